/*
 * kvgraph: a KV cache made of cells, and the ggml graphs that work on it.
 *
 * This is the only public header. It is plain C; `pykvgraph/_native/ffi.py` is generated from it.
 *
 * Conventions
 * - Every function that can fail returns a kvg_status. kvg_last_error() then gives the message, for the calling thread.
 * - A struct that crosses the boundary begins with `struct_size`, set by the caller to sizeof(the struct).
 * - Integers that come from a user are int64_t. Each call checks their range; a call that fails this check changes nothing.
 * - A handle may be used by one thread at a time. Different handles may be used by different threads at the same time.
 * - Freeing NULL does nothing. A context keeps its model's weights alive, so both may be freed in any order.
 * - A returned string lives as long as the handle that it came from, unless stated otherwise.
 */
#ifndef KVGRAPH_H
#define KVGRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVG_API __attribute__((visibility("default")))
#else
#define KVG_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---- */

typedef enum kvg_status {
    KVG_OK = 0,
    KVG_INVALID_ARGUMENT = 1, /* an argument has a value that the call doesn't accept; nothing was changed */
    KVG_MODEL_LOAD = 2,       /* the file is not a model, or it is damaged or can't be read */
    KVG_NOT_FOUND = 3,        /* the file does not exist */
    KVG_CACHE_FULL = 4,       /* there are not enough empty cells; nothing was changed */
    KVG_UNSUPPORTED = 5,      /* the request is valid, but this build, model or device can't do it */
    KVG_DEVICE = 6,           /* a device is missing, out of memory, or failed */
    KVG_INTERNAL = 7          /* a bug in kvgraph */
} kvg_status;

/* The message of the calling thread's last failed call. Never NULL. */
KVG_API const char * kvg_last_error(void);

/* Bytes of stack that the calling thread has left; 0 when they are unknown. */
KVG_API uint64_t kvg_stack_left(void);

/* ---- library ---- */

KVG_API const char * kvg_version(void);
/* The ggml version that this library was compiled against, and the version that is loaded in this process. */
KVG_API const char * kvg_ggml_version_built(void);
KVG_API const char * kvg_ggml_version_running(void);
/* "struct:size:field@offset,field@offset,...;" for every struct of this header, with the compiler's sizes and offsets. */
KVG_API const char * kvg_struct_layout(void);

/* Receives ggml's log lines. level: 1 debug, 2 info, 3 warning, 4 error. The callback must not call kvgraph. NULL: no log. */
typedef void (*kvg_log_callback)(int32_t level, const char * text, void * user_data);
KVG_API void kvg_log_set(kvg_log_callback callback, void * user_data);

/* ---- devices ---- */

typedef enum kvg_device_type {
    KVG_DEVICE_CPU = 0,
    KVG_DEVICE_GPU = 1,
    KVG_DEVICE_ACCEL = 2
} kvg_device_type;

typedef struct kvg_device_info {
    size_t struct_size;
    const char * name; /* as `device=` takes it: "CPU", "Vulkan0", ...; lives as long as the process */
    const char * description;
    int32_t type;         /* kvg_device_type */
    uint64_t memory_free; /* bytes; 0 when unknown */
    uint64_t memory_total;
} kvg_device_info;

KVG_API int32_t kvg_device_count(void);
KVG_API kvg_status kvg_device_get(int32_t index, kvg_device_info * out);
/* Adds the devices of an RPC server ("host:port") to the end of the list. Adding the same server again changes nothing. ggml ends the
   process when no server of its own version answers, and when a server that is in use ends. The caller must prevent that. */
KVG_API kvg_status kvg_rpc_add_server(const char * endpoint);

/* ---- GGUF files ---- */

typedef struct kvg_gguf kvg_gguf;

typedef struct kvg_gguf_kv {
    size_t struct_size;
    const char * key;
    int32_t type;     /* GGUF value type of the value, or of an array's items: 0 u8 1 i8 2 u16 3 i16 4 u32 5 i32
                             6 f32 7 bool 8 string 10 u64 11 i64 12 f64 */
    int32_t is_array; /* 1: an array of `n` items; 0: a scalar, n = 1 */
    uint64_t n;
    const void * data; /* n values, little-endian, packed; NULL for strings (kvg_gguf_get_string) */
} kvg_gguf_kv;

typedef struct kvg_gguf_tensor {
    size_t struct_size;
    const char * name;
    const char * type; /* ggml's name of the type: "f32", "q4_K", ... */
    int64_t ne[4];     /* elements per dimension, innermost first; 1 beyond the last */
    int32_t part;      /* which file of a split model has it; 0 for a whole one */
    uint64_t offset;   /* bytes from the start of that file */
    uint64_t size;     /* bytes */
    const void * data; /* in the file of a model with all of its layers, which is mapped; else NULL */
} kvg_gguf_tensor;

/* What the value of a key is taken for. */
typedef enum kvg_override_type {
    KVG_OVERRIDE_INT = 0,
    KVG_OVERRIDE_FLOAT = 1,
    KVG_OVERRIDE_BOOL = 2,
    KVG_OVERRIDE_STR = 3
} kvg_override_type;

/* A key's value in place of the file's, or beside those that it has. */
typedef struct kvg_override {
    size_t struct_size;
    const char * key;
    int32_t type;    /* kvg_override_type: which of the next is the value */
    int64_t integer; /* also of a bool: 0 or 1 */
    double number;
    const char * text; /* may be NULL where it isn't the value */
} kvg_override;

/* Opens and checks a file: header, keys, every tensor's type, shape, offset and size against the file's length. The first part of a
   split model opens the others too, which lie beside it: keys are those of the first, tensors those of all. From then on keys have the
   values of n overrides. KVG_INVALID_ARGUMENT for one of another type than the file's, of an array, and of a key that says how the file is
   built. */
KVG_API kvg_status kvg_gguf_open(const char * path, const kvg_override * overrides, int64_t n_overrides, kvg_gguf ** out);
KVG_API void kvg_gguf_free(kvg_gguf * gguf);
/* The descriptor of an open part, as its name may be another file's by now; open as long as the handle. -1: there is none. */
KVG_API int32_t kvg_gguf_fd(const kvg_gguf * gguf, uint64_t part);
/* The files that the model is in: 1, or the parts of a split one. */
KVG_API uint64_t kvg_gguf_n_parts(const kvg_gguf * gguf);
/* A part's path, which lives as long as the handle, and its size in bytes. */
KVG_API kvg_status kvg_gguf_get_part(const kvg_gguf * gguf, uint64_t index, const char ** path, uint64_t * size);
KVG_API uint64_t kvg_gguf_n_kv(const kvg_gguf * gguf);
KVG_API uint64_t kvg_gguf_n_tensors(const kvg_gguf * gguf);
KVG_API kvg_status kvg_gguf_get_kv(const kvg_gguf * gguf, uint64_t index, kvg_gguf_kv * out);
/* Item `item` of a string value (0 for a scalar); `length` in bytes, not NUL-terminated by promise. */
KVG_API kvg_status kvg_gguf_get_string(const kvg_gguf * gguf, uint64_t index, uint64_t item, const char ** data,
                                       uint64_t * length);
/* All strings of such a value one behind the other, each with a NUL behind it. n_bytes: of all of them. Nothing is written when there
   are over `room` bytes. */
KVG_API kvg_status kvg_gguf_copy_strings(const kvg_gguf * gguf, uint64_t index, char * data, uint64_t room, uint64_t * n_bytes);
KVG_API kvg_status kvg_gguf_get_tensor(const kvg_gguf * gguf, uint64_t index, kvg_gguf_tensor * out);
/* Whether libllama may be given this file as a tokenizer: it ends the process on some of what a file can hold.
   KVG_UNSUPPORTED for a kind that is neither SentencePiece BPE nor BPE by a list of merges; KVG_MODEL_LOAD for what is damaged. */
KVG_API kvg_status kvg_gguf_check_vocab(const kvg_gguf * gguf);

/* ---- models ---- */

typedef struct kvg_model kvg_model;

typedef struct kvg_model_info {
    size_t struct_size;
    const char * arch;
    const char * device; /* where the layers live: names separated by commas, the CPU's only if there is no other */
    int64_t n_layer;
    int64_t n_embd;
    int64_t n_head; /* the greatest of any layer; so are n_head_kv and head_dim. kvg_model_get_layer gives each layer's */
    int64_t n_head_kv;
    int64_t head_dim;
    int64_t n_vocab;
    int64_t n_ctx_train;
    int64_t n_params; /* of the layers that are here; so is weight_bytes */
    uint64_t weight_bytes;
    int64_t layer_begin; /* layers [layer_begin, layer_end) are here: all, unless the model is a stage */
    int64_t layer_end;
    int32_t
        encodes; /* 1: an encoder: a text is decoded in one call, nothing of it stays in the cache, and there are no logits */
    int64_t n_classes;          /* scores that a text gets by kvg_classify; 0: the model has no classifier */
    int32_t classifies_by_mean; /* 1: by the mean of a text's states; 0: by one, an encoder's first, another's last */
    int32_t n_draft_heads;      /* of the layers the last ones are draft heads: 0, or 1 where they were asked for */
    int32_t has_draft_head;     /* 1: the file has a draft head that can be used here, whether it was asked for or not */
    int64_t n_embd_target; /* an assistant, which drafts for another model: the width of that model's states; 0: it is none */
    const char * kept_on_cpu; /* why the CPU multiplies matrices of layers on another device: a line for each; NULL for none */
} kvg_model_info;

typedef struct kvg_model_params {
    size_t struct_size;
    /* "auto": RPC servers that were added and every GPU, or an integrated one where there is no other; "none" or "cpu"; or names
       from kvg_device_get separated by commas, in any case of letters */
    const char * devices;
    int64_t
        n_gpu_layers; /* the last n layers go to the devices; the output counts as one layer. Negative: all. The others stay on
                             the CPU */
    const float *
        tensor_split; /* n_split shares of those layers, one for each device; devices without a share get no layers. NULL, or
                         all 0: shares are in proportion to free memory */
    int64_t n_split;
    const kvg_override * overrides; /* n_overrides, as kvg_gguf_open takes them */
    int64_t n_overrides;
    /* A stage: layers [layer_begin, layer_end) alone; both 0: all. The first stage has the token embeddings, the last one the output. All
       layers keep their numbers, and groups of cells theirs: a group may have no layers here. KVG_UNSUPPORTED for a model that can't be cut
       there. */
    int64_t layer_begin;
    int64_t layer_end;
    int32_t
        draft_heads; /* 1: the model's own draft head is one more layer, with cells of its own, for kvg_draft. KVG_UNSUPPORTED for a file
                            that has none, and for a stage */
    const char *
        assistant; /* a file that drafts for the model in place of a draft head (architecture gemma4-assistant); NULL: none. KVG_UNSUPPORTED for
                      one of another model. It lies where the model's output does, and has no cells: it reads the model's */
} kvg_model_params;

KVG_API kvg_status kvg_model_load(const char * path, const kvg_model_params * params, kvg_model ** out);
KVG_API void kvg_model_free(kvg_model * model);
KVG_API kvg_status kvg_model_get_info(const kvg_model * model, kvg_model_info * out);
/* The device of a layer; the output is layer n_layer. "" for what is not of this stage. Lives as long as the process. */
KVG_API kvg_status kvg_model_layer_device(const kvg_model * model, int64_t layer, const char ** out);
/* What a layer's recurrent state is of. */
typedef enum kvg_state {
    KVG_STATE_NONE = 0,
    KVG_STATE_SHORT_CONV = 1,
    KVG_STATE_DELTA_NET = 2,
    KVG_STATE_MAMBA2 = 3
} kvg_state;

/* What graphs and the cache need to know about a layer. */
typedef struct kvg_layer_info {
    size_t struct_size;
    int64_t group; /* the number of its group of cells, in every context of the model; -1: the layer doesn't attend */
    int32_t state; /* kvg_state */
    int64_t n_head;
    int64_t n_head_kv;
    int64_t head_dim_k;
    int64_t head_dim_v;
    int64_t window;  /* how many positions a token attends to, including its own; 0: all */
    int64_t n_rot;   /* dimensions of each head of K that are rotated by the position; 0: none */
    int64_t kv_from; /* the layer whose K and V it reads: its own number, or that of an earlier layer */
    int64_t
        state_bytes; /* of its state, for each sequence; a row of states (kvg_kv_read_state) has those of all layers in their order */
} kvg_layer_info;

KVG_API kvg_status kvg_model_get_layer(const kvg_model * model, int64_t layer, kvg_layer_info * out);
/* The file's directory and metadata; belongs to the model. */
KVG_API const kvg_gguf * kvg_model_gguf(const kvg_model * model);
/* Checks a file's metadata and fills `out`, without reading weights. KVG_UNSUPPORTED or KVG_MODEL_LOAD when it can't be run. */
KVG_API kvg_status kvg_gguf_check_model(const kvg_gguf * gguf, kvg_model_info * out);
/* A layer of the model that the file would be; fails as kvg_gguf_check_model does. */
KVG_API kvg_status kvg_gguf_get_layer(const kvg_gguf * gguf, int64_t layer, kvg_layer_info * out);

/* ---- contexts ---- */

typedef struct kvg_context kvg_context;

/* The types in which K and V can be stored; the numbers are ggml's. Quantized types have blocks of 32 values, so the size of a head must be
   a multiple of 32. */
typedef enum kvg_type {
    KVG_TYPE_F32 = 0,
    KVG_TYPE_F16 = 1,
    KVG_TYPE_Q4_0 = 2,
    KVG_TYPE_Q4_1 = 3,
    KVG_TYPE_Q5_0 = 6,
    KVG_TYPE_Q5_1 = 7,
    KVG_TYPE_Q8_0 = 8,
    KVG_TYPE_BF16 = 30
} kvg_type;

typedef enum kvg_flash_attn {
    KVG_FLASH_ATTN_AUTO = -1,
    KVG_FLASH_ATTN_OFF = 0,
    KVG_FLASH_ATTN_ON = 1
} kvg_flash_attn;

/* Where K and V of layers are whose weights are on a device with memory of its own. */
typedef enum kvg_kv_tier {
    KVG_KV_TIER_DEVICE = 0, /* there */
    KVG_KV_TIER_HOST =
        1 /* in host memory; each layer's attended span is copied there for its turn, and what it wrote is copied back */
} kvg_kv_tier;

typedef struct kvg_context_params {
    size_t struct_size;
    int64_t n_ctx;     /* cells, >= 1 */
    int64_t n_batch;   /* the most tokens in one decode, >= 1 */
    int64_t n_ubatch;  /* the most tokens in one graph, >= 1; a value above n_batch counts as n_batch */
    int64_t n_seq_max; /* sequence ids are 0 .. n_seq_max - 1; 1 .. 256 */
    int64_t n_threads; /* CPU threads for one token, 1 .. 512 */
    int64_t n_threads_batch;
    int32_t type_k; /* kvg_type */
    int32_t type_v;
    int32_t flash_attn;     /* kvg_flash_attn */
    int32_t hadamard;       /* 1: quantized K and V are mixed by a Hadamard matrix (docs/state-format.md); 0: they are not */
    float defrag_threshold; /* decode runs defrag when holes / n_kv is greater than this; negative: never */
    int32_t offload_kqv;    /* 1: each layer's cells are on the device of its weights; 0: in host memory, and the CPU attends */
    int32_t swa_full;       /* 1: groups with a window keep every position; 0: they have n_seq_max * window + n_batch +
                               checkpoint_cells cells, n_ctx at most, and reuse cells that their sequences have left behind */
    int64_t checkpoint_bytes; /* of states, for checkpoints and resume points, beside two for each sequence; -1: 8 states */
    int64_t checkpoint_cells; /* of each group with a window, for kvg_kv_checkpoint; >= 0 */
    int64_t device_layers;    /* for KVG_KV_TIER_HOST: layers whose rows each device has room for at a time, >= 1 */
    int32_t kv_tier;          /* kvg_kv_tier; KVG_KV_TIER_HOST wants offload_kqv to be 1 */
    int64_t resident_layers;  /* for KVG_KV_TIER_HOST: layers whose K and V stay on their device all the same, >= 0 */
    int64_t
        n_outputs_max; /* the most outputs of one graph, >= 0; at least n_seq_max, 32, and those of 16 MiB of logits. Not for an encoder */
    int64_t
        n_fresh; /* cells of each group without a window whose rows are in type_k and type_v; the others' are in old_type_k and
                           old_type_v. A multiple of 128; 0, or n_ctx and more: all of them */
    int32_t old_type_k; /* kvg_type; means nothing when n_fresh is 0 */
    int32_t old_type_v;
} kvg_context_params;

KVG_API kvg_status kvg_context_new(kvg_model * model, const kvg_context_params * params, kvg_context ** out);
KVG_API void kvg_context_free(kvg_context * context);
/* The file of the context's model. It lives as long as the context, also after the model's handle was freed. */
KVG_API const kvg_gguf * kvg_context_gguf(const kvg_context * context);
/* Seconds spent in decode graphs so far. The rest of a decode's time is spent outside the graph. */
KVG_API double kvg_context_graph_seconds(const kvg_context * context);

/* ---- LoRA adapters ---- */

typedef struct kvg_adapter kvg_adapter;

typedef struct kvg_adapter_info {
    size_t struct_size;
    int64_t n_pairs;  /* matrices of the model that it adds to */
    int64_t n_params; /* numbers in all of its own */
    uint64_t bytes;   /* on all devices */
    float alpha;      /* its file's; what it adds is multiplied by alpha / rank, unless alpha is 0 */
} kvg_adapter_info;

/* A GGUF file as llama.cpp makes them (general.type "adapter", adapter.type "lora"). Its weights go where the model's are that they belong
   to. Contexts that use it keep its weights alive. KVG_MODEL_LOAD for one of another model, KVG_UNSUPPORTED for another kind. */
KVG_API kvg_status kvg_adapter_load(kvg_model * model, const char * path, kvg_adapter ** out);
KVG_API void kvg_adapter_free(kvg_adapter * adapter);
KVG_API kvg_status kvg_adapter_get_info(const kvg_adapter * adapter, kvg_adapter_info * out);
/* The file's directory and metadata; belongs to the adapter. */
KVG_API const kvg_gguf * kvg_adapter_gguf(const kvg_adapter * adapter);
/* From the next decode on these n adapters take part, each times its scale, and no others; cells stay as they are. All or nothing. Scale 0:
   it doesn't take part. */
KVG_API kvg_status kvg_context_set_adapters(kvg_context * context, kvg_adapter * const * adapters, const float * scales,
                                            int64_t n);

/* What a context has on one device. */
typedef struct kvg_context_part {
    size_t struct_size;
    const char * device;
    int64_t n_layer;       /* layers whose weights are there, without the output */
    int64_t n_cache;       /* layers whose cells are there */
    uint64_t weight_bytes; /* including weights that are mapped from the file */
    uint64_t mapped_bytes; /* of these, those that are mapped */
    uint64_t cache_bytes;
    uint64_t compute_bytes;
    const char * attention;  /* "flash", "plain", "attend" (this library's own); "" without cells */
    int32_t shift_on_device; /* 1: the device rotates K itself; 0: the CPU rotates K for it. 1 without cells */
    const char * fallbacks;  /* operations of its layers that the CPU does instead: "ROPE, SOFT_MAX"; "" when there are none */
    uint64_t pinned_bytes;   /* of cache_bytes, those in host memory that a device copies from and to directly */
} kvg_context_part;

/* One part for each device that holds weights, cells or graph memory; the CPU is last. The sizes are the current ones: a decode with many
   outputs may have made graphs larger. Strings live as long as the context. */
KVG_API int64_t kvg_context_n_parts(kvg_context * context);
KVG_API kvg_status kvg_context_get_part(kvg_context * context, int64_t index, kvg_context_part * out);

/* What a model and a context would have on each device. This reads no weights and allocates no cache, but for a moment it allocates the
   memory of the graphs. adapters: paths of n_adapters LoRA adapters that take part; their own matrices are not counted. */
typedef struct kvg_plan kvg_plan;

KVG_API kvg_status kvg_plan_new(const char * path, const kvg_model_params * model, const kvg_context_params * context,
                                const char * const * adapters, int64_t n_adapters, kvg_plan ** out);
KVG_API void kvg_plan_free(kvg_plan * plan);
KVG_API int64_t kvg_plan_n_parts(const kvg_plan * plan);
KVG_API kvg_status kvg_plan_get_part(const kvg_plan * plan, int64_t index, kvg_context_part * out);

/* ---- decode ---- */

/* n_tokens tokens; token i is seen by sequences seq_id[seq_begin[i] .. seq_begin[i + 1]). */
typedef struct kvg_batch {
    size_t struct_size;
    int64_t n_tokens;
    const int32_t * token;
    const int32_t * pos;
    const int32_t * seq_begin; /* n_tokens + 1 offsets into seq_id, rising from 0 */
    const int32_t * seq_id;
    const uint8_t * logits;     /* 1: this token's row is an output */
    const uint8_t * checkpoint; /* 1: its sequences get a checkpoint behind it, as by kvg_kv_checkpoint; NULL: none */
    const float *
        hidden;     /* (n_tokens, n_embd): what the stage before has written to kvg_output.embd, in place of `token`, which may
                             be NULL then; NULL where layer 0 is */
    int32_t repair; /* 1: tokens may lie below later positions of their sequences, and replace what stands there */
    int64_t n_observed; /* of the last so many tokens kvg_attention() tells what they attend to */
    int32_t peaks;      /* 1: kvg_attention_of_heads() tells the most that any of them does */
} kvg_batch;

/* A summary of the softmax of a row of logits. log_sum is NaN when a logit is NaN, or the greatest logit is infinite. */
typedef struct kvg_score {
    int32_t best;       /* the most probable token; among equals the one with the lowest id */
    float best_logprob; /* the logarithm of its probability */
    float log_sum;      /* log of the sum of exp(logit): a token's log probability is its logit minus this */
} kvg_score;

/* The buffers into which decode writes a row per output token, in batch order. The caller owns them. NULL: not wanted. In a stage that isn't
   the last one every token is an output. */
typedef struct kvg_output {
    size_t struct_size;
    float * logits; /* (n_outputs, n_vocab); not of a stage that isn't the last one */
    float * embd; /* (n_outputs, n_embd): the last hidden state, after the final norm; of such a stage, behind its last layer */
    kvg_score * score; /* (n_outputs): a summary of each row of logits; KVG_INVALID_ARGUMENT when `logits` is NULL */
    int64_t n_rows;    /* rows that the buffers hold; KVG_INVALID_ARGUMENT when the batch has more outputs */
    int64_t n_written; /* set by the call: the number of rows written, or -1 when the call failed */
} kvg_output;

/* Decodes all tokens of a batch or none. What is pending (defrag, K-shift) is done first; it can fail half way, as in kvg_kv_update. After
   any other failure the cells are as they were, except that K-shifts and moves which were completed stay completed.

   With batch->repair a token sees what its sequences have before its position, and nothing after it; what lies after it keeps its K and V.
   A sequence that has a cell at the token's position has the token's in its place afterwards; other sequences and holds keep the old one.
   Empty cells for all tokens are needed all the same. KVG_INVALID_ARGUMENT when a sequence has several cells at such a position.
   KVG_UNSUPPORTED when a window has lost what such a token sees, and for layers with a recurrent state. Checkpoints that would bring back
   replaced cells are dropped.

   With batch->n_observed KVG_UNSUPPORTED where attention isn't this library's own on the CPU. */
KVG_API kvg_status kvg_decode(kvg_context * context, const kvg_batch * batch, kvg_output * output);

/* What the observed tokens of the last decode attend to: of each cell of a group, as it lies until the next call that moves cells, the share
   of their attention, the mean over tokens, layers of the group and query heads. All shares together are 1, less what sinks take. out:
   (n_cells). KVG_INVALID_ARGUMENT when that decode observed none, or peaks, or failed. */
KVG_API kvg_status kvg_attention(const kvg_context * context, int64_t group, float * out);
/* The same for each head of K and V: out (n_layer, n_head_kv, n_cells), the mean over tokens and the query heads that read it; of a batch with
   `peaks` the highest share instead. */
KVG_API kvg_status kvg_attention_of_heads(const kvg_context * context, int64_t group, float * out);

/* Decodes one token at the end of a sequence, at its last position + 1, as an output. Otherwise as kvg_decode. */
KVG_API kvg_status kvg_append(kvg_context * context, int64_t seq, int64_t token, kvg_output * output);

/* Texts for which tokens are drafted. */
typedef struct kvg_draft_request {
    size_t struct_size;
    int64_t n;                /* texts */
    const int32_t * seq;      /* (n): their sequences, all different */
    const int32_t * token;    /* (n): the last token of each, which is not decoded yet */
    const int32_t * n_tokens; /* (n): how many tokens to draft, 0 to `most` */
    int64_t most;
    int32_t * drafted; /* (n, most): set by the call; -1 behind the last one */
} kvg_draft_request;

/* Drafts tokens that may follow texts, by the model's draft head or assistant: the likeliest one behind each text, and then behind that
   one. Fewer for a text whose last state is not known: that of the last tokens of a decode is, until others take its place. A draft head
   needs cells for all tokens, but no longer than the call; an assistant needs none. Apart from that it is as kvg_decode. output: rows of
   its logits and states, one for each drafted token: first the first ones of all texts, then the second ones; no scores; NULL: not wanted.
   KVG_UNSUPPORTED for a model that has neither. */
KVG_API kvg_status kvg_draft(kvg_context * context, const kvg_draft_request * request, kvg_output * output);

/* The scores of n texts by the model's classifier. states: what each text's states were pooled into, (n, n_embd); scores:
   (n, n_classes). KVG_UNSUPPORTED for a model without classifier. */
KVG_API kvg_status kvg_classify(kvg_context * context, const float * states, int64_t n, float * scores);

/* Removes the tokens of the last kvg_decode or kvg_append from the cache: each sequence of the batch loses its positions from its first one
   in the batch on, or, after a repair, the batch's tokens alone, and has again what they replaced. Does nothing when that call failed, or
   was undone already. Call it before these sequences are changed in any other way, and after a repair before any other call. */
KVG_API kvg_status kvg_undo_decode(kvg_context * context);

/* What a context with KVG_KV_TIER_HOST did when. */
typedef enum kvg_span_kind {
    KVG_SPAN_COPY_IN = 0, /* the attended span of a layer's K and V, to its device */
    KVG_SPAN_COMPUTE = 1, /* a layer's graph, and what lies between it and the next layer that attends */
    KVG_SPAN_COPY_OUT = 2 /* the rows that the layer wrote, to host memory */
} kvg_span_kind;

typedef struct kvg_span {
    double begin; /* seconds of a clock that never goes back */
    double end;   /* when it was known to be over */
    uint64_t n_bytes;
    int32_t layer;
    int32_t kind; /* kvg_span_kind */
} kvg_span;

/* Moves the oldest spans to `out`, n at most, and sets n_taken. There are spans from the first call on: to know them takes waiting for each
   layer. The last 65,536 are kept. KVG_UNSUPPORTED where nothing is copied: with
   KVG_KV_TIER_DEVICE, and when no layer is on a device. */
KVG_API kvg_status kvg_take_spans(kvg_context * context, kvg_span * out, int64_t n, int64_t * n_taken);

/* ---- the cache ---- */

typedef enum kvg_defrag_policy {
    KVG_DEFRAG_FILL = 0, /* cells from the end move into holes at the front; no policy needs fewer moves */
    KVG_DEFRAG_SORT = 1  /* cells with the same set of sequences become one run of neighbours */
} kvg_defrag_policy;

typedef struct kvg_kv_info {
    size_t struct_size;
    int64_t n_groups; /* of cells */
    int64_t n_free;   /* tokens that can be decoded: empty cells in the groups that keep every position */
    int64_t n_seq_max;
    int64_t n_layer;
    int64_t bytes;      /* K, V and states, wherever they are */
    int64_t cell_bytes; /* of one cell in every group together */
    int32_t type_k;     /* kvg_type */
    int32_t type_v;
    int32_t can_shift;      /* 1: this model's K can be rotated to another position, or no K has one (ALiBi, no attention) */
    int64_t n_states;       /* rows of recurrent states; 0: no layer has a state */
    int64_t n_states_used;  /* of these, by sequences, checkpoints and resume points */
    int64_t n_state_layers; /* layers with a state */
    int64_t state_bytes;    /* of a row: the states of all layers */
} kvg_kv_info;

typedef enum kvg_group_kind {
    KVG_GROUP_FULL = 0,  /* holds every position of its sequences */
    KVG_GROUP_WINDOW = 1 /* holds the positions that a later position can still attend to */
} kvg_group_kind;

/* A group: the cells of all layers with the same window and the same row sizes. */
typedef struct kvg_group_info {
    size_t struct_size;
    int32_t kind;    /* kvg_group_kind */
    int64_t window;  /* 0 for KVG_GROUP_FULL */
    int64_t n_cells; /* capacity */
    int64_t n_used;  /* cells that are not empty */
    int64_t n_kv;    /* highest used cell + 1 */
    int64_t n_layer;
    int64_t n_head_kv;
    int64_t head_dim_k;
    int64_t head_dim_v;
    int64_t n_attended;  /* cells that the last graph of the last decode attended over */
    int64_t k_row_bytes; /* of one cell in one layer */
    int64_t v_row_bytes;
    int32_t hadamard_k; /* 1: rows of K are mixed by a Hadamard matrix */
    int32_t hadamard_v;
    int32_t long_rope; /* 1: K was rotated with LongRoPE's factors for long contexts */
    int32_t settled;   /* 1: the cells whose K-shift is pending wait; 0: the next update decides whether they do */
    int64_t n_fresh;   /* cells before this one have rows of those sizes, the others have the sizes below; 0: all have those */
    int64_t old_k_row_bytes;
    int64_t old_v_row_bytes;
} kvg_group_info;

typedef struct kvg_update_stats {
    size_t struct_size;
    int64_t shifted_cells; /* cells whose K was rotated */
    int64_t waiting_cells; /* cells that wait after the last update: attention rotates the queries instead of K */
    int64_t moved_cells;
    int64_t moved_bytes; /* K and V of the moved cells, all layers */
    int64_t graphs;      /* ggml graphs that were run */
    double seconds;
    int64_t aged_cells; /* cells whose rows were converted to the old types */
} kvg_update_stats;

KVG_API kvg_status kvg_kv_get_info(const kvg_context * context, kvg_kv_info * out);
KVG_API kvg_status kvg_kv_get_group(const kvg_context * context, int64_t group, kvg_group_info * out);
/* The layers (n_layer) of a group, in rising order. */
KVG_API kvg_status kvg_kv_group_layers(const kvg_context * context, int64_t group, int32_t * out);

/* Ranges of positions are [p0, p1); p0 < 0 means 0, p1 < 0 means no end. */
/* seq < 0: every one. KVG_INVALID_ARGUMENT, with nothing changed, when a sequence would end before what its window has lost
   (kvg_kv_seq_lost), and no checkpoint leads there */
KVG_API kvg_status kvg_kv_seq_rm(kvg_context * context, int64_t seq, int64_t p0, int64_t p1);
/* Single positions (n_pos), rising, before the sequence's last one. */
KVG_API kvg_status kvg_kv_seq_rm_at(kvg_context * context, int64_t seq, const int32_t * pos, int64_t n_pos);
KVG_API kvg_status kvg_kv_seq_cp(kvg_context * context, int64_t src, int64_t dst, int64_t p0, int64_t p1);
KVG_API kvg_status kvg_kv_seq_keep(kvg_context * context, int64_t seq);
KVG_API kvg_status kvg_kv_seq_add(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t delta);
KVG_API kvg_status kvg_kv_seq_div(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t d);
KVG_API kvg_status kvg_kv_seq_pos_min(const kvg_context * context, int64_t seq, int64_t * out); /* -1: no cells */
KVG_API kvg_status kvg_kv_seq_pos_max(const kvg_context * context, int64_t seq, int64_t * out);
/* Of every sequence (n_seq_max) in a group with a window: the highest position whose cell was reused, and with it all before count as
   lost; -1: none. A token at position p can be decoded when it is below p - window + 1. */
KVG_API kvg_status kvg_kv_seq_lost(const kvg_context * context, int64_t group, int32_t * out);
/* For every sequence (arrays of n_seq_max): its lowest and highest position, -1 when it has no cells, and the number of its cells. */
KVG_API kvg_status kvg_kv_seq_bounds(const kvg_context * context, int32_t * pos_min, int32_t * pos_max, int32_t * n_cells);
/* Counts a sequence's cells in a range: all of them, and those that another sequence also sees or a hold keeps. */
KVG_API kvg_status kvg_kv_seq_count(const kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t * n_cells,
                                    int64_t * n_shared);
/* A sequence's cells in a group from position p0 on, and their positions, in the order of positions. n_there: how many there are; the
   first n of them are written. cells and pos may be NULL for n = 0. */
KVG_API kvg_status kvg_kv_seq_cells(const kvg_context * context, int64_t seq, int64_t group, int64_t p0, int32_t * cells,
                                    int32_t * pos, int64_t n, int64_t * n_there);
/* Every cell becomes empty, every hold is released, and rows of K and V that were written become zero. data: all rows become zero. */
KVG_API kvg_status kvg_kv_clear(kvg_context * context, int32_t data);

/* A hold is a set of cells under an id: those of a sequence at positions [p0, p1). It keeps these cells as they are, whatever is done to the
   sequence. kvg_kv_seq_rm, kvg_kv_seq_keep and kvg_kv_replace do not empty them. kvg_kv_seq_add and kvg_kv_seq_div give the sequence
   copies of its own, as for cells that another sequence sees. Defrag may move them. */
typedef struct kvg_hold {
    size_t struct_size;
    int64_t id; /* for kvg_kv_attach and kvg_kv_release; never used for another hold */
    int64_t p0;
    int64_t p1;
} kvg_hold;

/* Holds the range [p0, p1) of a sequence. KVG_INVALID_ARGUMENT unless the sequence sees a cell at each of its positions. */
KVG_API kvg_status kvg_kv_hold(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, kvg_hold * out);
/* The sequence sees the cells of the hold too; nothing is copied. p1: only those at positions below it; negative: all.
   KVG_INVALID_ARGUMENT unless the sequence's last position is p0 - 1, and p0 is below p1. An empty sequence counts as ending at -1, so
   it takes a hold that begins at position 0. */
KVG_API kvg_status kvg_kv_attach(kvg_context * context, int64_t hold, int64_t seq, int64_t p1);
/* Releases a hold. Its cells become empty, unless a sequence sees them or another hold keeps them. KVG_INVALID_ARGUMENT when the hold was
   released already; kvg_kv_clear releases all holds. */
KVG_API kvg_status kvg_kv_release(kvg_context * context, int64_t hold);

/* The cells of a hold or a resume point in a group, by position: how many, and where cells is not NULL, the first n of them. None where the
   group keeps nothing for it. KVG_INVALID_ARGUMENT when the hold was released. */
KVG_API kvg_status kvg_kv_held_cells(const kvg_context * context, int64_t hold, int64_t group, int32_t * cells, int64_t n,
                                     int64_t * n_there);
/* The row of the state that a resume point keeps; -1: none. */
KVG_API kvg_status kvg_kv_held_state(const kvg_context * context, int64_t hold, int64_t * row);

/* For models whose layers have windows or states, where a hold alone is not enough to go on: what windows need in front of position p of a
   sequence (negative: where it ends), and its state there, kept whatever becomes of it. A hold, whose p0 and p1 are that position:
   kvg_kv_attach takes it as the last one, for a sequence that goes on there and has no state of its own (what it has in windows is
   replaced). Texts are not compared. KVG_INVALID_ARGUMENT for a sequence without cells, and for a position from which it can't go on;
   KVG_CACHE_FULL when there is no room for another state. */
KVG_API kvg_status kvg_kv_resume_point(kvg_context * context, int64_t seq, int64_t p, kvg_hold * out);
/* The same, kept for the sequence, and moved with it, until something comes or goes around its position, or a window needs the cells, or a
   decode or a load a row for its state. Then the checkpoint nearest to another of its sequence, or to position 0, goes first, of equal
   ones the one that was not used for longest; none where all of them would be too few. p: its position. */
KVG_API kvg_status kvg_kv_checkpoint(kvg_context * context, int64_t seq, int64_t * p);
/* The positions of a sequence's checkpoints, in rising order: the first n of them; n_there: how many there are. p may be NULL for n = 0. */
KVG_API kvg_status kvg_kv_checkpoints(const kvg_context * context, int64_t seq, int64_t * p, int64_t n, int64_t * n_there);
/* Removes what the sequence has from the largest position at or before p on where it can go on: p itself, a checkpoint's, or 0. out: that
   position. */
KVG_API kvg_status kvg_kv_rewind(kvg_context * context, int64_t seq, int64_t p, int64_t * out);

KVG_API kvg_status kvg_kv_defrag(kvg_context * context, int32_t policy);
/* Runs defrag and then K-shift, as far as each is pending. `out` may be NULL.

   Shifted cells can wait when K is quantized and in host memory. The condition: at least 64 cells have the same shift, and on average 32
   of them are in a chunk of 128 cells. K of a waiting cell is not rotated. The CPU's attention rotates the queries for it, so K is not
   rounded again. Cells of all sequences count. So an operation on one sequence (seq_rm, seq_add, seq_div, also where these copy shared
   cells) can leave too few cells with the same shift in another one; their K is then rotated and rounded once.

   When the device fails before a graph starts, or while cells move into holes, completed work stays and the rest is still pending. When
   a K-shift or a sort fails half way, K and V are no longer valid. Then every call that needs them (decode, update, read, replace, and
   seq_add and seq_div with copies) returns KVG_DEVICE until kvg_kv_clear. */
KVG_API kvg_status kvg_kv_update(kvg_context * context, kvg_update_stats * out);
/* The updates that decode, kvg_kv_read (of K) and kvg_kv_read_rows did themselves, added up since the last call of this function.
   waiting_cells: the number after the last of these updates, 0 when there was none. */
KVG_API kvg_status kvg_kv_take_stats(kvg_context * context, kvg_update_stats * out);

/* Composite cells: cells of a sequence in a group without a window, of which n_kept stay, and each head of each layer has K and V of n_kept
   of its own choice in these. */
typedef struct kvg_kv_composite {
    size_t struct_size;
    int64_t group;
    int64_t n_cells;
    const int32_t *
        cells; /* (n_cells), all different; all that the sequence has at their positions, and nobody else has any of them */
    int64_t n_kept;       /* 1 to n_cells */
    const int32_t * from; /* (n_layer, n_head_kv, n_kept): indices into `cells`, rising for each head */
} kvg_kv_composite;

/* groups: one for each group without a window, in their order, all with the same positions and the same n_kept. The lowest n_kept of the cells
   stay, all at the last of the positions; the sequence leaves the others, and in groups with a window the other positions. K is rotated to
   the cells' positions before, also of cells that wait. All rows of such a cell move alike from then on. KVG_UNSUPPORTED for a model that
   tells distances by cells' positions (ALiBi), and where rows age. When the device fails while rows are written, K and V can't be used until kvg_kv_clear. */
KVG_API kvg_status kvg_kv_compose(kvg_context * context, int64_t seq, const kvg_kv_composite * groups, int64_t n_groups);

/* A snapshot of a group's cells. pos (n_cells); seq (n_cells, n): a bit for each sequence, in n = (n_seq_max + 63) / 64 words; shift
   (n_cells): the pending shift; dither (n_cells): the dither that K carries, as docs/state-format.md numbers it; n_holds (n_cells).
   NULL: not wanted. */
KVG_API kvg_status kvg_kv_cells(const kvg_context * context, int64_t group, int32_t * pos, uint64_t * seq, int32_t * shift,
                                uint8_t * dither, uint32_t * n_holds);
KVG_API kvg_status kvg_kv_state_layers(const kvg_context * context, int32_t * out); /* (n_state_layers), rising */
/* The rows of recurrent states, n_states of them: pos, the position of the last token that is in the state, -1 where nobody has the row;
   seq, as above; n_holds, how many checkpoints and resume points keep it. NULL: not wanted. */
KVG_API kvg_status kvg_kv_states(const kvg_context * context, int32_t * pos, uint64_t * seq, uint32_t * n_holds);
/* K (v = 0) or V (v = 1) of a layer as floats: out (n_cells, n_head_kv, head_dim). Before K is read, a pending K-shift runs as in
   kvg_kv_update. K of cells that wait is rotated in `out` only. */
KVG_API kvg_status kvg_kv_read(kvg_context * context, int64_t layer, int32_t v, float * out, uint64_t n_floats);

/* ---- state ---- */

/* Rows of some cells in a layer, on their way to another cache (kvg_kv_pack). */
typedef struct kvg_packed kvg_packed;

/* Cells of one group that come from outside. data: K and then V of each of its layers, a row per cell. The values are not checked: NaN or
   infinity may reach sequences that don't see the cell. */
typedef struct kvg_kv_rows {
    size_t struct_size;
    int64_t n_cells;
    const int32_t * pos;
    const uint8_t * seq;    /* (n_cells, n_seq_max) of 0/1, at least one 1 per cell, here or in `kept` */
    const uint8_t * kept;   /* the same: sequences that don't see the cell, and whose checkpoints hold it; NULL: none */
    const uint8_t * dither; /* (n_cells), as kvg_kv_cells gives it */
    const int32_t * lost;   /* (n_seq_max), as kvg_kv_seq_lost gives it; NULL: nothing */
    const uint8_t * data;
    uint64_t n_bytes;
    const kvg_packed * const *
        packed;            /* (n_layer): rows that are there, in place of those in `data`, or NULL; NULL: all are in `data` */
    const int32_t * which; /* (n_cells): which of the packed rows each cell gets; NULL without packed rows */
} kvg_kv_rows;

/* The rows to read, and the buffers for them. */
typedef struct kvg_kv_read_request {
    size_t struct_size;
    int64_t group;
    int64_t layer_begin; /* layers [layer_begin, layer_end), as indices into the group's layers */
    int64_t layer_end;
    const int32_t * cells;
    int64_t n_cells;
    uint8_t * data; /* as in kvg_kv_rows */
    uint64_t n_bytes;
    uint8_t * dither; /* (n_cells): the dither that K in `data` carries */
} kvg_kv_read_request;

/* Raw K and V of cells. A pending K-shift runs first, as in kvg_kv_update. K of cells that wait is rotated in `data` only. */
KVG_API kvg_status kvg_kv_read_rows(kvg_context * context, const kvg_kv_read_request * request);
/* Copies K and V of cells, as kvg_kv_read_rows gives them. layer: an index into the group's layers. What is on a device stays there, in a
   buffer of its own, unless K of any of these cells waits for its rotation. */
KVG_API kvg_status kvg_kv_pack(kvg_context * context, int64_t group, int64_t layer, const int32_t * cells, int64_t n_cells,
                               kvg_packed ** out);
/* May be called from any thread. */
KVG_API void kvg_packed_free(kvg_packed * packed);
/* Checkpoints that come with cells (kvg_kv_rows). */
typedef struct kvg_kv_checkpoint_list {
    size_t struct_size;
    int64_t n;
    const int32_t * seq;
    const int32_t * p;    /* their positions */
    const int32_t * lost; /* (n, n_groups): as kvg_kv_checkpoint_cells gives it; cells beyond it and before p are held */
} kvg_kv_checkpoint_list;

/* Recurrent states that come with cells. A row is as kvg_kv_read_state gives it; several sequences and checkpoints may have the same. */
typedef struct kvg_kv_state_list {
    size_t struct_size;
    int64_t n;
    const int32_t * seq;
    const int32_t * p;   /* of a checkpoint; -1: where the sequence ends */
    const int32_t * row; /* of `data` */
    int64_t n_rows;
    const float * data; /* (n_rows, state_bytes / 4) */
} kvg_kv_state_list;

/* Replaces the cells of a sequence (seq < 0: of all sequences) in every group by these, or fails and changes nothing. When the device fails
   while rows are written, the cells are as they were, but K and V can't be used until kvg_kv_clear, as after kvg_kv_update. checkpoints,
   states: NULL: none. Where layers have a state each checkpoint must have one, and a sequence that has none can't go on. */
KVG_API kvg_status kvg_kv_replace(kvg_context * context, int64_t seq, const kvg_kv_rows * groups, int64_t n_groups,
                                  const kvg_kv_checkpoint_list * checkpoints, const kvg_kv_state_list * states);
/* One row of recurrent states: out (state_bytes / 4). Of a row that nobody has: zeros, or what it had last. */
KVG_API kvg_status kvg_kv_read_state(const kvg_context * context, int64_t row, float * out);
/* Of each checkpoint of a sequence, in rising order of positions, the row of its state: out. KVG_INVALID_ARGUMENT where no layer has one. */
KVG_API kvg_status kvg_kv_checkpoint_states(const kvg_context * context, int64_t seq, int32_t * out);
/* How many cells kvg_kv_replace can take for a sequence (seq < 0: for all) in each group (n_groups); -1 in a group that keeps every
   position, where fewer cells than there are will not do. */
KVG_API kvg_status kvg_kv_room(const kvg_context * context, int64_t seq, int64_t * out);
/* What the checkpoints of a sequence hold in a group. lost: of each, in rising order of positions, the highest position that it has not;
   -1: none. kept (n_cells): 1 for a cell that one of them holds. */
KVG_API kvg_status kvg_kv_checkpoint_cells(const kvg_context * context, int64_t seq, int64_t group, int32_t * lost,
                                           uint8_t * kept);

/* ---- rows that are written piece by piece ---- */

/* Cells whose content comes from outside while the context decodes. kvg_kv_reserve takes empty cells. kvg_incoming_write fills their rows,
   some layers at a time, from any thread. kvg_kv_show lets a sequence see them. Until then defrag does not move them. */
typedef struct kvg_incoming kvg_incoming;

/* The positions to reserve in one group. */
typedef struct kvg_kv_place {
    size_t struct_size;
    int64_t n_cells;
    const int32_t * pos;    /* (n_cells), in rising order */
    const uint8_t * dither; /* (n_cells), as kvg_kv_cells gives it */
} kvg_kv_place;

/* Rows to write in one group. */
typedef struct kvg_incoming_rows {
    size_t struct_size;
    int64_t group;
    int64_t layer_begin; /* layers [layer_begin, layer_end), as indices into the group's layers */
    int64_t layer_end;
    int64_t cell_begin; /* reserved cells [cell_begin, cell_end), in the order of their positions */
    int64_t cell_end;
    const uint8_t * data; /* as in kvg_kv_rows, of these layers and cells */
    uint64_t n_bytes;
    const uint8_t * dither; /* (cell_end - cell_begin): that K in `data` carries; NULL: what the cells were reserved with */
} kvg_incoming_rows;

/* groups: one for each group of the cache, all with the same positions. KVG_CACHE_FULL, with nothing reserved, when a group has too few
   empty cells. */
KVG_API kvg_status kvg_kv_reserve(kvg_context * context, const kvg_kv_place * groups, int64_t n_groups, kvg_incoming ** out);
/* May be called from any thread, also while another thread uses the context. Several threads may call it; their writes are done one after
   the other. The values are not checked. */
KVG_API kvg_status kvg_incoming_write(kvg_incoming * incoming, const kvg_incoming_rows * rows);
/* The sequence sees the cells. KVG_INVALID_ARGUMENT, with nothing changed, unless the sequence ends before the first reserved position and
   all rows were written; also after kvg_kv_clear. state (state_bytes / 4): at its end now; NULL: not known. KVG_CACHE_FULL when there is no
   room for it. */
KVG_API kvg_status kvg_kv_show(kvg_context * context, kvg_incoming * incoming, int64_t seq, const float * state);
/* The same for a text, which begins at position 0: of windows, what comes before their rows is lost, and these may begin before the sequence's
   end, where the window has lost them. */
KVG_API kvg_status kvg_kv_show_text(kvg_context * context, kvg_incoming * incoming, int64_t seq, const float * state);
/* The cells become empty again, unless they were shown. */
KVG_API kvg_status kvg_kv_give_back(kvg_context * context, kvg_incoming * incoming);
/* May be called from any thread. Cells that were neither shown nor given back become empty in the next call on the context. */
KVG_API void kvg_incoming_free(kvg_incoming * incoming);

/* ---- rows that are taken while they are computed ---- */

/* Copies of the rows that decodes write for a sequence, as soon as a layer has written them. Only decodes with two tokens of it or more are
   taken: those of one token are read faster when they are over. */
typedef struct kvg_tap kvg_tap;

typedef struct kvg_tapped {
    size_t struct_size;
    int64_t group;   /* -1: nothing came */
    int64_t layer;   /* an index into the group's layers */
    int64_t n_cells; /* 0: a mark */
    uint64_t n_bytes;
} kvg_tapped;

/* What decodes did since they were told of before. */
typedef struct kvg_tap_told {
    size_t struct_size;
    int64_t n_decodes; /* that succeeded, with tokens of the sequence */
    int64_t first;     /* the lowest position that they decoded; -1: none */
    int64_t taken;     /* the last position whose rows were taken, also of a decode that failed; -1: none */
} kvg_tap_told;

/* max_bytes: of rows that nobody has taken. When there would be more, all is dropped and the tap is over: a decode never waits. 0: no rows
   are taken. */
KVG_API kvg_status kvg_tap_open(kvg_context * context, int64_t seq, uint64_t max_bytes, kvg_tap ** out);
KVG_API kvg_status kvg_tap_tell(kvg_context * context, kvg_tap * tap, kvg_tap_told * out);
/* Puts a mark behind all that was taken so far, which wakes who waits. Nothing on a tap that takes no rows. May be called from any thread. */
KVG_API kvg_status kvg_tap_mark(kvg_tap * tap);
/* Waits until something has come, or so many milliseconds. These two are for one thread, which needn't be the context's. Order: as it was
   computed. KVG_DEVICE when the tap is over. */
KVG_API kvg_status kvg_tap_next(kvg_tap * tap, int64_t milliseconds, kvg_tapped * out);
/* What kvg_tap_next told of last: positions (n_cells), data (n_bytes): K of each cell, then V. */
KVG_API kvg_status kvg_tap_take(kvg_tap * tap, int32_t * pos, uint8_t * data, uint64_t n_bytes);
/* May be called from any thread. */
KVG_API void kvg_tap_free(kvg_tap * tap);

/* ---- long texts ---- */

/* The special tokens of a vocabulary of libllama's. It may be used by several threads at the same time. */
typedef struct kvg_specials kvg_specials;

/* libllama's llama_vocab_get_attr, llama_vocab_get_text and llama_tokenize */
typedef int32_t (*kvg_token_attr)(const void * vocab, int32_t token);
typedef const char * (*kvg_token_text)(const void * vocab, int32_t token);
typedef int32_t (*kvg_tokenize_text)(const void * vocab, const char * text, int32_t size, int32_t * ids, int32_t room,
                                     bool add_special, bool parse_special);

/* Keeps nothing of the vocabulary. */
KVG_API kvg_status kvg_specials_new(const void * vocab, int64_t n_tokens, kvg_token_attr attr, kvg_token_text text,
                                    kvg_specials ** out);
KVG_API void kvg_specials_free(kvg_specials * specials);
/* Bytes of the longest token's text, be it special or not. */
KVG_API uint64_t kvg_specials_longest(const kvg_specials * specials);
/* 1: there are tokens that drop the white space beside them; else 0. */
KVG_API int32_t kvg_specials_strip(const kvg_specials * specials);
/* The ids that libllama's llama_tokenize gives to a text without add_special, in a time that grows with the text and not with the square
   of the special tokens in it. n: how many they are; of more than `room` none is of use. *stop: as soon as another thread makes it
   another number than 0, the call ends at the next special token, and no id is of use. */
KVG_API kvg_status kvg_specials_encode(const kvg_specials * specials, const void * vocab, kvg_tokenize_text tokenize,
                                       const char * text, int64_t size, int32_t parse_special, const int32_t * stop,
                                       int32_t * ids, int64_t room, uint64_t * n);

/* ---- faults, for tests ---- */

/* Only in a library built with KVGRAPH_TEST_HOOKS; KVG_UNSUPPORTED in any other. The `countdown`-th pass through `site` fails (1: the next
   one); 0 switches the fault off.
   Sites: "cells", "build", "alloc", "compute", "shift-build", "shift-alloc", "shift-compute", "defrag-build",
   "defrag-alloc", "defrag-compute", "defrag-cells" (sort, after the rows of a step), "copy-build", "copy-alloc", "copy-compute",
   "load-write" (after the rows), "compose-rows" (after the rows of one tensor), "alloc-kept" (a small graph gets no memory of its own, and shares that of the others).
   Seven more sites change what is computed, as long as `countdown` is not 0: "shift-skip" (K is not rotated), "shift-sign" (K is rotated
   in the wrong direction), "defrag-source" (each move reads the row next to its source), "lacks-rope" and "lacks-mul-mat" (no
   device except the CPU has that operation), "window" (in models that are loaded meanwhile every second layer, from the first on,
   attends to `countdown` positions) and "chunk" (their chunks have so many). */
KVG_API kvg_status kvg_test_fault(const char * site, int64_t countdown);

#ifdef __cplusplus
}
#endif

#endif
