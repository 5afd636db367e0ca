// How the compiler laid out the header's structs, for callers to compare.
#include <cstddef>
#include <string>

#include "kvgraph.h"

#define LAYOUT_BEGIN(type) text += #type ":" + std::to_string(sizeof(type)) + ":"
#define LAYOUT_FIELD(type, field) text += #field "@" + std::to_string(offsetof(type, field)) + ","
#define LAYOUT_END text.back() = ';'

static std::string struct_layout() {
    std::string text;
#define F(field) LAYOUT_FIELD(kvg_device_info, field)
    LAYOUT_BEGIN(kvg_device_info), F(struct_size), F(name), F(description), F(type), F(memory_free), F(memory_total);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_gguf_kv, field)
    LAYOUT_BEGIN(kvg_gguf_kv), F(struct_size), F(key), F(type), F(is_array), F(n), F(data);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_gguf_tensor, field)
    LAYOUT_BEGIN(kvg_gguf_tensor), F(struct_size), F(name), F(type), F(ne), F(offset), F(size), F(data);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_model_info, field)
    LAYOUT_BEGIN(kvg_model_info), F(struct_size), F(arch), F(device), F(n_layer), F(n_embd), F(n_head), F(n_head_kv),
        F(head_dim), F(n_vocab), F(n_ctx_train), F(n_params), F(weight_bytes);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_model_params, field)
    LAYOUT_BEGIN(kvg_model_params), F(struct_size), F(devices), F(n_gpu_layers), F(tensor_split), F(n_split);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_context_params, field)
    LAYOUT_BEGIN(kvg_context_params), F(struct_size), F(n_ctx), F(n_batch), F(n_ubatch), F(n_seq_max), F(n_threads),
        F(n_threads_batch), F(type_k), F(type_v), F(flash_attn), F(hadamard), F(defrag_threshold), F(offload_kqv);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_context_part, field)
    LAYOUT_BEGIN(kvg_context_part), F(struct_size), F(device), F(n_layer), F(n_cache), F(weight_bytes), F(cache_bytes),
        F(compute_bytes), F(attention), F(shift_on_device), F(fallbacks);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_batch, field)
    LAYOUT_BEGIN(kvg_batch), F(struct_size), F(n_tokens), F(token), F(pos), F(seq_begin), F(seq_id), F(logits);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_output, field)
    LAYOUT_BEGIN(kvg_output), F(struct_size), F(logits), F(embd), F(score), F(n_rows), F(n_written);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_score, field)
    LAYOUT_BEGIN(kvg_score), F(best), F(best_logprob), F(log_sum);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_kv_info, field)
    LAYOUT_BEGIN(kvg_kv_info), F(struct_size), F(n_cells), F(n_used), F(n_kv), F(n_seq_max), F(n_layer), F(n_head_kv),
        F(head_dim_k), F(head_dim_v), F(n_attended), F(bytes), F(cell_bytes), F(type_k), F(type_v), F(hadamard_k),
        F(hadamard_v), F(can_shift);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_kv_rows, field)
    LAYOUT_BEGIN(kvg_kv_rows), F(struct_size), F(n_cells), F(pos), F(seq), F(dither), F(data), F(n_bytes);
    LAYOUT_END;
#undef F
#define F(field) LAYOUT_FIELD(kvg_update_stats, field)
    LAYOUT_BEGIN(kvg_update_stats), F(struct_size), F(shifted_cells), F(waiting_cells), F(moved_cells), F(moved_bytes),
        F(graphs), F(seconds);
    LAYOUT_END;
#undef F
    return text;
}

const char * kvg_struct_layout(void) {
    static const std::string text = struct_layout();
    return text.c_str();
}
