// What recipes are made of, and the lists of them.
#pragma once

#include <functional>
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
// Files may have scales for these, which libllama doesn't use.
tensors unscaled(tensors all);
tensors with_presence(presence p, tensors all);
// for layers that are not named otherwise
tensors only(with layers, tensors all);
tensors frame(const char * norm_name = "output_norm.weight");
// The output has a matrix of its own.
tensors frame_untied();
tensors attn_norm();
tensors projections();
tensors attention();
tensors output_bias_of_attention(presence p);
tensors head_norms();
// One norm of all a token's queries, another of its K.
tensors wide_norms();
tensors post_norms();
tensors ffn_norm(const char * name = "ffn_norm.weight");
tensors gated();
tensors gated_biases();
tensors gated_in_one();
tensors ungated();
tensors ungated_without_biases();
tensors experts();
tensors experts_without_gates();
// gate and up in one matrix, or in two
tensors fused_experts();
tensors expert_biases();
tensors shared_expert(presence router);
// Of models that score texts: one matrix, or two with a bias each.
tensors classifier_of_one();
tensors classifier_of_two();
// by_mean: of a text's states, unless the file says otherwise
void read_classifier(const metadata & in, hparams & h, bool by_mean = false);
// What is added to a router's numbers when experts are chosen.
tensors choice_bias(presence p);
tensors latent_attention();
// Of a layer that attends by a latent, which has one head of K.
void read_latent(const metadata & in, layer_spec & layer);
void read_windows(const metadata & in, hparams & h, uint32_t window, uint32_t period, float base, float scale);

// Every fourth layer has none; all have the same base, whatever a file says.
void read_windows_of_one_base(const metadata & in, hparams & h, uint32_t window, float scale);
// Layers without a window rotate nothing.
void rotate_in_windows(hparams & h);
// ALiBi in place of rope.
void tell_distances(hparams & h, float max_bias);
// Files that also see pictures have sections of positions, and halves for pairs.
void read_sections_of_halves(const metadata & in, hparams & h);
// These are in turn: pairs of the first three, one after the other. The key must be there.
void require_sections_in_turn(const metadata & in, const hparams & h);
void require_sections_of_halves(const metadata & in, const hparams & h);
// error(KVG_MODEL_LOAD) unless the key is an array.
void require_array(const metadata & in, const hparams & h, const char * key);
void require_experts(const metadata & in, hparams & h);
// These layers have no experts.
void make_dense(const metadata & in, hparams & h, const std::function<bool(uint32_t)> & is_dense);
// The first ones.
void read_leading_dense(const metadata & in, hparams & h);
void read_shared_expert(const metadata & in, hparams & h, uint32_t fallback);
// width: of each layer's shared expert, for the width of one of its experts
void share(hparams & h, const std::function<uint64_t(uint64_t)> & width);
// An expert that every token goes to, as wide as so many of the others.
void read_shared_count(const metadata & in, hparams & h, uint64_t least);
// How a router's numbers become weights, as far as files say it. fallback: 1 softmax, 2 sigmoid, 0 none
void read_gating(const metadata & in, hparams & h, uint32_t fallback);
// Whether weights are divided by their sum, and what multiplies them.
void read_weights(const metadata & in, hparams & h);
// Scales of embeddings, logits and what layers add.
void read_granite(const metadata & in, hparams & h);
// The row's files may have a draft head. norm: whether it must have one of its own, or may end with the model's
arch_recipe with_draft_head(arch_recipe r, presence norm = presence::optional);
// A row with RMS norms and SwiGLU, whose rope rotates whole heads and has no factors.
arch_recipe recipe(const char * name, int rope_mode, const tensors & frame, const tensors & layer,
                   void (*read)(const metadata & in, hparams & h));
// Rope may rotate a part of each head.
arch_recipe partial(arch_recipe r);
arch_recipe with_experts(arch_recipe r, gating_kind gating, decltype(arch_recipe::experts) experts);

// Llama, Qwen, Phi, gpt-oss.
std::vector<arch_recipe> plain_recipes();
std::vector<arch_recipe> gemma_recipes();
// Granite, OLMo, SmolLM3, GLM-4, EXAONE 4 and others with RMS norms.
std::vector<arch_recipe> rms_recipes();
// Command-R, Phi-2, StarCoder2 and others with layer norms.
std::vector<arch_recipe> layer_norm_recipes();
// DeepSeek, Llama 4, GLM-4.5, MiniMax-M2, Ling 2, dots.llm1, ERNIE 4.5: experts behind or between dense layers.
std::vector<arch_recipe> expert_recipes();
// XVERSE, InternLM 2, MiniCPM and others that are like Llama.
std::vector<arch_recipe> llama_like_recipes();
// DeepSeek 1, EXAONE MoE, Cohere 2 MoE, Arctic and others with experts.
std::vector<arch_recipe> mixture_recipes();
// Muse Glimmer, AFMoE, Laguna, Spark 2.5: a gate behind attention.
std::vector<arch_recipe> gated_recipes();
// BERT and its like: every token sees the whole text.
std::vector<arch_recipe> encoder_recipes();
// Those with recurrent layers.
std::vector<arch_recipe> hybrid_recipes();

} // namespace kvg
