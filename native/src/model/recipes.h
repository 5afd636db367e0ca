// What recipes are made of, and the lists of them.
#pragma once

#include <vector>

#include "model/arch.h"

namespace kvg {

using tensors = std::vector<tensor_spec>;

constexpr extent one = extent::one;

tensors operator+(tensors a, const tensors & b);
tensor_spec vector_of(const char * name, role r, extent n, presence p, with layers = with::any);
tensor_spec matrix(const char * name, role r, extent in, extent out, presence p, with layers = with::any);
tensor_spec cube(const char * name, role r, extent in, extent out);
tensors with_scales(scale how, tensors all);
// for layers that are not named otherwise
tensors only(with layers, tensors all);
tensors frame(const char * norm_name = "output_norm.weight");
tensors attn_norm();
tensors projections();
tensors attention();
tensors output_bias_of_attention(presence p);
tensors head_norms();
tensors post_norms();
tensors ffn_norm(const char * name = "ffn_norm.weight");
tensors gated();
tensors gated_biases();
tensors gated_in_one();
tensors ungated();
tensors experts();
// gate and up in one matrix, or in two
tensors fused_experts();
tensors expert_biases();
void read_windows(const metadata & in, hparams & h, uint32_t window, uint32_t period, float base, float scale);

// Llama, Qwen, Phi, gpt-oss.
std::vector<arch_recipe> plain_recipes();
std::vector<arch_recipe> gemma_recipes();
// Those with recurrent layers.
std::vector<arch_recipe> hybrid_recipes();

} // namespace kvg
