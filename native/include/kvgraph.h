/*
 * kvgraph: a KV cache that is cells, and the ggml graphs that work on them.
 *
 * The only public header. Plain C, so that cffi can parse it: `pykvgraph/_native/ffi.py` is generated from it.
 *
 * Conventions
 * - Every function that can fail returns a kvg_status; kvg_last_error() then tells why, for the calling thread.
 * - A struct that crosses the boundary begins with `struct_size`, set by the caller to sizeof(the struct).
 * - Integers that come from a user are int64_t: each call checks their range itself and fails without changing anything.
 * - A handle may be used by one thread at a time; different handles by different threads.
 * - Freeing NULL is a no-op. A context keeps its model's weights alive: free them in any order.
 * - Strings that are returned live as long as the handle they came from.
 */
#ifndef KVGRAPH_H
#define KVGRAPH_H

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
    KVG_INVALID_ARGUMENT = 1, /* a value that no call may have; nothing was changed */
    KVG_MODEL_LOAD = 2,       /* a file that is not a model, a damaged one, or one that may not be read */
    KVG_NOT_FOUND = 3,        /* no such file */
    KVG_CACHE_FULL = 4,       /* not enough empty cells; nothing was changed */
    KVG_UNSUPPORTED = 5,      /* valid, but not something this build can do */
    KVG_DEVICE = 6,           /* a device is missing, out of memory, or failed */
    KVG_INTERNAL = 7          /* a bug in kvgraph */
} kvg_status;

/* What went wrong in the calling thread's last failing call: what, why, what to do. Never NULL. */
KVG_API const char * kvg_last_error(void);

/* Bytes of stack that the calling thread has left; 0 where the system doesn't tell. */
KVG_API uint64_t kvg_stack_left(void);

/* ---- library ---- */

KVG_API const char * kvg_version(void);
/* The ggml version that this library was compiled against; and the one that answers in this process. */
KVG_API const char * kvg_ggml_version_built(void);
KVG_API const char * kvg_ggml_version_running(void);
/* "struct:size:field@offset,field@offset,...;" for every struct of this header, as the compiler laid them out. */
KVG_API const char * kvg_struct_layout(void);

/* ggml's log lines. level: 1 debug, 2 info, 3 warning, 4 error. NULL: silence. Must not call kvgraph. */
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
    uint64_t memory_free; /* bytes; 0 when the device doesn't tell */
    uint64_t memory_total;
} kvg_device_info;

KVG_API int32_t kvg_device_count(void);
KVG_API kvg_status kvg_device_get(int32_t index, kvg_device_info * out);
/* The devices of an RPC server ("host:port") join the others, at the end; a second time nothing changes. ggml ends the process when no
   server of its own version answers there, and whenever one that it uses dies: the caller sees to that. */
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
    const void * data; /* in the mapped file */
} kvg_gguf_tensor;

/* Opens and checks a file: header, keys, every tensor's type, shape, offset and size against the file's length. The first part of a
   split model opens the others too, which lie beside it: keys are those of the first, tensors those of all. */
KVG_API kvg_status kvg_gguf_open(const char * path, kvg_gguf ** out);
KVG_API void kvg_gguf_free(kvg_gguf * gguf);
/* The open file's own descriptor, as its name may be another file's by now; open as long as the handle. -1 for NULL. */
KVG_API int32_t kvg_gguf_fd(const kvg_gguf * gguf);
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
KVG_API kvg_status kvg_gguf_get_tensor(const kvg_gguf * gguf, uint64_t index, kvg_gguf_tensor * out);
/* Whether libllama may be given this file as a tokenizer: it ends the process on some of what a file can hold.
   KVG_UNSUPPORTED for another kind than SentencePiece BPE and byte-level BPE; KVG_MODEL_LOAD for what is damaged. */
KVG_API kvg_status kvg_gguf_check_vocab(const kvg_gguf * gguf);

/* ---- models ---- */

typedef struct kvg_model kvg_model;

typedef struct kvg_model_info {
    size_t struct_size;
    const char * arch;
    const char * device; /* where the layers live: names separated by commas, the CPU's only if there is no other */
    int64_t n_layer;
    int64_t n_embd;
    int64_t n_head; /* the most of any layer, as the next two; kvg_model_get_layer tells each one's */
    int64_t n_head_kv;
    int64_t head_dim;
    int64_t n_vocab;
    int64_t n_ctx_train;
    int64_t n_params;
    uint64_t weight_bytes;
} kvg_model_info;

typedef struct kvg_model_params {
    size_t struct_size;
    /* "auto": RPC servers that were added and every GPU, or an integrated one where there is no other; "none" or "cpu"; or names
       from kvg_device_get separated by commas, in any case of letters */
    const char * devices;
    int64_t n_gpu_layers; /* the last n go there, the output being one more layer; negative: all. The others stay on the CPU */
    const float *
        tensor_split; /* n_split shares of those layers, one per device; fewer: the rest get none; NULL, or all 0: as much
                                   as each has free memory */
    int64_t n_split;
} kvg_model_params;

KVG_API kvg_status kvg_model_load(const char * path, const kvg_model_params * params, kvg_model ** out);
KVG_API void kvg_model_free(kvg_model * model);
KVG_API kvg_status kvg_model_get_info(const kvg_model * model, kvg_model_info * out);
/* The device of a layer; the output is layer n_layer. Lives as long as the process. */
KVG_API kvg_status kvg_model_layer_device(const kvg_model * model, int64_t layer, const char ** out);
/* A layer as graphs and cache know it. */
typedef struct kvg_layer_info {
    size_t struct_size;
    int64_t group; /* of cells: those of a context have the same numbers */
    int64_t n_head;
    int64_t n_head_kv;
    int64_t head_dim_k;
    int64_t head_dim_v;
    int64_t window; /* positions that a token attends to, its own included; 0: all */
    int64_t n_rot;  /* dimensions of each head of K that positions turn; 0: none */
} kvg_layer_info;

KVG_API kvg_status kvg_model_get_layer(const kvg_model * model, int64_t layer, kvg_layer_info * out);
/* The file's directory and metadata; belongs to the model. */
KVG_API const kvg_gguf * kvg_model_gguf(const kvg_model * model);
/* Reads a file's metadata and says with which recipe it would run; KVG_UNSUPPORTED or KVG_MODEL_LOAD when not. No weights. */
KVG_API kvg_status kvg_gguf_check_model(const kvg_gguf * gguf, kvg_model_info * out);

/* ---- contexts ---- */

typedef struct kvg_context kvg_context;

/* What K and V can be kept in; the numbers are ggml's. The quantized ones hold blocks of 32, so that a head's size must be a multiple. */
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

typedef struct kvg_context_params {
    size_t struct_size;
    int64_t n_ctx;     /* cells, >= 1 */
    int64_t n_batch;   /* most tokens in one decode, >= 1 */
    int64_t n_ubatch;  /* most tokens in one graph, >= 1; no more than n_batch are ever used */
    int64_t n_seq_max; /* sequence ids are 0 .. n_seq_max - 1; 1 .. 256 */
    int64_t n_threads; /* CPU threads for one token, 1 .. 512 */
    int64_t n_threads_batch;
    int32_t type_k; /* kvg_type */
    int32_t type_v;
    int32_t flash_attn;     /* kvg_flash_attn */
    int32_t hadamard;       /* 1: quantized K and V are kept mixed (docs/state-format.md); 0: as they are */
    float defrag_threshold; /* decode compacts when holes / n_kv passes it; negative: never */
    int32_t offload_kqv;    /* 1: each layer's cells lie where its weights do; 0: in host memory, and the CPU attends */
} kvg_context_params;

KVG_API kvg_status kvg_context_new(kvg_model * model, const kvg_context_params * params, kvg_context ** out);
KVG_API void kvg_context_free(kvg_context * context);
/* The file of the context's model; belongs to the context, whatever became of the model's handle. */
KVG_API const kvg_gguf * kvg_context_gguf(const kvg_context * context);
/* Seconds spent in decode graphs so far: the rest of a decode's time is everybody else's. */
KVG_API double kvg_context_graph_seconds(const kvg_context * context);

/* What a context has on one device. */
typedef struct kvg_context_part {
    size_t struct_size;
    const char * device;
    int64_t n_layer;       /* whose weights are there, without the output */
    int64_t n_cache;       /* whose cells are there */
    uint64_t weight_bytes; /* what is mapped from the file included */
    uint64_t cache_bytes;
    uint64_t compute_bytes;
    const char * attention;  /* "flash", "plain", "attend" (this library's own); "" without cells */
    int32_t shift_on_device; /* 1: it rotates K itself; 0: the CPU does it for it. 1 without cells */
    const char * fallbacks;  /* operations of its layers that the CPU does: "ROPE, SOFT_MAX"; "" when there are none */
} kvg_context_part;

/* One for each device that has anything, the CPU last; as it is now: a decode with many outputs may have made graphs larger. Strings live as long as the context. */
KVG_API int64_t kvg_context_n_parts(kvg_context * context);
KVG_API kvg_status kvg_context_get_part(kvg_context * context, int64_t index, kvg_context_part * out);

/* What a model and a context on it would have on each device, without reading weights or allocating a cache: the graphs' memory is
   taken for a moment. */
typedef struct kvg_plan kvg_plan;

KVG_API kvg_status kvg_plan_new(const char * path, const kvg_model_params * model, const kvg_context_params * context,
                                kvg_plan ** out);
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
    const uint8_t * logits; /* 1: this token's row is an output */
} kvg_batch;

/* What a softmax of the logits would say. log_sum is NaN when a logit is, or the greatest is infinite. */
typedef struct kvg_score {
    int32_t best;       /* the likeliest token, the lowest id among equals */
    float best_logprob; /* the logarithm of its probability */
    float log_sum;      /* log of the sum of exp(logit): a token's log probability is its logit less this */
} kvg_score;

/* Where decode writes a row per output token, in batch order. NULL: not wanted. Owned by the caller. */
typedef struct kvg_output {
    size_t struct_size;
    float * logits;    /* (n_outputs, n_vocab) */
    float * embd;      /* (n_outputs, n_embd): the last hidden state, after the final norm */
    kvg_score * score; /* (n_outputs): what each row says; with logits only, else KVG_INVALID_ARGUMENT */
    int64_t n_rows;    /* rows that the buffers hold; fewer than the batch's outputs: KVG_INVALID_ARGUMENT */
    int64_t n_written; /* set by the call: rows written, -1 unless it succeeded */
} kvg_output;

/* All or nothing: on any failure the cells are as they were, but for shifts and moves already completed. What is pending is flushed
   first, and can fail half way as kvg_kv_update can. */
KVG_API kvg_status kvg_decode(kvg_context * context, const kvg_batch * batch, kvg_output * output);

/* One token at the end of a sequence, at its last position + 1, as an output: what a token loop does. Otherwise as kvg_decode. */
KVG_API kvg_status kvg_append(kvg_context * context, int64_t seq, int64_t token, kvg_output * output);

/* Takes the tokens of the last kvg_decode or kvg_append out of the cache again: each of its sequences loses its positions from the
   batch's first one on. Nothing happens when that call failed, or was undone already. Call it before anything else is done to these
   sequences. */
KVG_API kvg_status kvg_undo_decode(kvg_context * context);

/* ---- the cache ---- */

typedef enum kvg_defrag_policy {
    KVG_DEFRAG_FILL = 0, /* holes from the front take cells from the tail; as few moves as there can be */
    KVG_DEFRAG_SORT = 1  /* one run of cells per distinct sequence set */
} kvg_defrag_policy;

typedef struct kvg_kv_info {
    size_t struct_size;
    int64_t n_groups; /* of cells */
    int64_t n_free;   /* cells that are empty in every group: as many tokens can be decoded */
    int64_t n_seq_max;
    int64_t n_layer;
    int64_t bytes;      /* K and V on the devices */
    int64_t cell_bytes; /* of one cell in each group */
    int32_t type_k;     /* kvg_type */
    int32_t type_v;
    int32_t can_shift; /* 1: this model's K can be rotated to another position */
} kvg_kv_info;

typedef enum kvg_group_kind {
    KVG_GROUP_FULL = 0,  /* every position that its sequences see */
    KVG_GROUP_WINDOW = 1 /* what a later position can still attend to */
} kvg_group_kind;

/* Cells of the layers whose window and rows are alike. */
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
    int64_t n_attended;  /* cells that the last decode's last graph looked at */
    int64_t k_row_bytes; /* of one cell in one layer */
    int64_t v_row_bytes;
    int32_t hadamard_k; /* 1: rows of K are kept times a Hadamard matrix */
    int32_t hadamard_v;
} kvg_group_info;

typedef struct kvg_update_stats {
    size_t struct_size;
    int64_t shifted_cells; /* cells whose K was rotated */
    int64_t waiting_cells; /* whose K-shift is pending, as attention turns the queries for them; after the last update */
    int64_t moved_cells;
    int64_t moved_bytes; /* K and V of the moved cells, all layers */
    int64_t graphs;      /* ggml graphs that were run */
    double seconds;
} kvg_update_stats;

KVG_API kvg_status kvg_kv_get_info(const kvg_context * context, kvg_kv_info * out);
KVG_API kvg_status kvg_kv_get_group(const kvg_context * context, int64_t group, kvg_group_info * out);
/* The layers (n_layer) of a group, rising. */
KVG_API kvg_status kvg_kv_group_layers(const kvg_context * context, int64_t group, int32_t * out);

/* Ranges are [p0, p1); p0 < 0 means 0, p1 < 0 means no end. */
KVG_API kvg_status kvg_kv_seq_rm(kvg_context * context, int64_t seq, int64_t p0, int64_t p1); /* seq < 0: every one */
KVG_API kvg_status kvg_kv_seq_cp(kvg_context * context, int64_t src, int64_t dst, int64_t p0, int64_t p1);
KVG_API kvg_status kvg_kv_seq_keep(kvg_context * context, int64_t seq);
KVG_API kvg_status kvg_kv_seq_add(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t delta);
KVG_API kvg_status kvg_kv_seq_div(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t d);
KVG_API kvg_status kvg_kv_seq_pos_min(const kvg_context * context, int64_t seq, int64_t * out); /* -1: no cells */
KVG_API kvg_status kvg_kv_seq_pos_max(const kvg_context * context, int64_t seq, int64_t * out);
/* Of every sequence, n_seq_max values each: its lowest and highest position, -1 when it has no cells, and the number of its cells. */
KVG_API kvg_status kvg_kv_seq_bounds(const kvg_context * context, int32_t * pos_min, int32_t * pos_max, int32_t * n_cells);
/* Of a sequence's cells in a range: how many there are, and how many of them another sequence sees too or a hold keeps. */
KVG_API kvg_status kvg_kv_seq_count(const kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t * n_cells,
                                    int64_t * n_shared);
/* Every cell becomes empty, every hold is released, and K and V that were written are zeroed; data: all of K and V is, written or not. */
KVG_API kvg_status kvg_kv_clear(kvg_context * context, int32_t data);

/* A hold keeps the cells of a range of positions [p0, p1) as they are, whatever becomes of the sequence that they were taken from:
   kvg_kv_seq_rm and seq_keep leave them, kvg_kv_replace too, and seq_add and seq_div give the sequence copies, as if another sequence
   saw them. Defrag moves them. */
typedef struct kvg_hold {
    size_t struct_size;
    int64_t id; /* for kvg_kv_attach and kvg_kv_release; never used again */
    int64_t p0;
    int64_t p1;
} kvg_hold;

/* Holds the range [p0, p1) of a sequence. KVG_INVALID_ARGUMENT unless the sequence sees a cell at each of its positions. */
KVG_API kvg_status kvg_kv_hold(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, kvg_hold * out);
/* A sequence sees the held cells too; nothing is copied. KVG_INVALID_ARGUMENT unless its last position is p0 - 1: the first hold begins
   at position 0 and goes to an empty sequence, others adjoin. */
KVG_API kvg_status kvg_kv_attach(kvg_context * context, int64_t hold, int64_t seq);
/* Cells that no sequence sees and no other hold keeps become empty. KVG_INVALID_ARGUMENT for a hold that was released, as
   kvg_kv_clear releases all of them. */
KVG_API kvg_status kvg_kv_release(kvg_context * context, int64_t hold);

KVG_API kvg_status kvg_kv_defrag(kvg_context * context, int32_t policy);
/* Defrag, then K-shift, as far as each is pending. `out` may be NULL. A cell whose K-shift is pending waits, with a quantized K in host
   memory, where at least 64 cells have the same shift, on average 32 in a chunk of 128: its K is not rotated, and the CPU's attention
   turns the queries for it, which rounds nothing. Cells of all sequences count: what is done to one sequence (seq_rm, seq_add and
   seq_div, also where they copy shared cells) can leave too few cells of another with the same shift, whose K is then rotated and
   rounded once. When the device fails before a graph, or while it moves cells into holes, what was completed stays and the rest is
   still pending. A K-shift or a sort that fails half way leaves K and V that nobody can trust: from then on whatever needs them
   (decode, update, read, seq_add and seq_div with copies, replace) is KVG_DEVICE until kvg_kv_clear. */
KVG_API kvg_status kvg_kv_update(kvg_context * context, kvg_update_stats * out);
/* What decode, kvg_kv_read (of K) and kvg_kv_read_rows flushed by themselves, added up since the last call of this function;
   waiting_cells: after the last of them, 0 when there was none. */
KVG_API kvg_status kvg_kv_take_stats(kvg_context * context, kvg_update_stats * out);

/* A snapshot of a group: pos (n_cells); seq (n_cells, n), a bit for each sequence, in n = (n_seq_max + 63) / 64 words; shift (n_cells);
   dither (n_cells): what K is made wrong by on purpose, as docs/state-format.md numbers it; n_holds (n_cells). NULL: not wanted. */
KVG_API kvg_status kvg_kv_cells(const kvg_context * context, int64_t group, int32_t * pos, uint64_t * seq, int32_t * shift,
                                uint8_t * dither, uint32_t * n_holds);
/* K (v = 0) or V (v = 1) of a layer, dequantized: out (n_cells, n_head_kv, head_dim). Before K is read a pending K-shift runs as in
   kvg_kv_update, and K of cells that wait is rotated in `out`. */
KVG_API kvg_status kvg_kv_read(kvg_context * context, int64_t layer, int32_t v, float * out, uint64_t n_floats);

/* ---- state ---- */

/* Cells of one group that come from outside: for each of its layers K then V, a row per cell. Values are taken as they are: what is not
   finite may reach sequences that don't see the cell. */
typedef struct kvg_kv_rows {
    size_t struct_size;
    int64_t n_cells;
    const int32_t * pos;
    const uint8_t * seq;    /* (n_cells, n_seq_max) of 0/1, at least one 1 per cell */
    const uint8_t * dither; /* (n_cells), as kvg_kv_cells gives it */
    const uint8_t * data;
    uint64_t n_bytes;
} kvg_kv_rows;

/* Which rows are wanted, and where they go. */
typedef struct kvg_kv_read_request {
    size_t struct_size;
    int64_t group;
    int64_t layer_begin; /* of the group's layers, by their places in it: [layer_begin, layer_end) */
    int64_t layer_end;
    const int32_t * cells;
    int64_t n_cells;
    uint8_t * data; /* as in kvg_kv_rows */
    uint64_t n_bytes;
    uint8_t * dither; /* (n_cells): what the K in `data` carries */
} kvg_kv_read_request;

/* Raw K and V of cells. A pending K-shift runs first as in kvg_kv_update, and K of cells that wait is rotated in `data`. */
KVG_API kvg_status kvg_kv_read_rows(kvg_context * context, const kvg_kv_read_request * request);
/* Replaces the cells of a sequence (seq < 0: of all) in every group by these. All or nothing; when the device fails while rows are
   written, the cells are as they were and the cache is unusable until kvg_kv_clear, as after kvg_kv_update. */
KVG_API kvg_status kvg_kv_replace(kvg_context * context, int64_t seq, const kvg_kv_rows * groups, int64_t n_groups);

/* ---- rows that come in piece by piece ---- */

/* Cells that come from outside while the context goes on: kvg_kv_reserve takes empty ones, kvg_incoming_write fills their rows in any
   thread, by layers, while the context decodes, and kvg_kv_show lets a sequence see them. Until then they stay where they are, and
   defrag moves others around them. */
typedef struct kvg_incoming kvg_incoming;

/* Positions in one group. */
typedef struct kvg_kv_place {
    size_t struct_size;
    int64_t n_cells;
    const int32_t * pos;    /* (n_cells), rising */
    const uint8_t * dither; /* (n_cells), as kvg_kv_cells gives it */
} kvg_kv_place;

/* Rows of one group. */
typedef struct kvg_incoming_rows {
    size_t struct_size;
    int64_t group;
    int64_t layer_begin; /* of the group's layers, by their places in it: [layer_begin, layer_end) */
    int64_t layer_end;
    int64_t cell_begin; /* of the reserved cells, in the order of their positions: [cell_begin, cell_end) */
    int64_t cell_end;
    const uint8_t * data; /* as in kvg_kv_rows, of these layers and cells */
    uint64_t n_bytes;
} kvg_incoming_rows;

/* One place for each group. KVG_CACHE_FULL with nothing reserved when a group has too few empty cells. */
KVG_API kvg_status kvg_kv_reserve(kvg_context * context, const kvg_kv_place * groups, int64_t n_groups, kvg_incoming ** out);
/* From any thread, also while another one calls the context; several may write at once, but one after the other. Values are taken as
   they are. */
KVG_API kvg_status kvg_incoming_write(kvg_incoming * incoming, const kvg_incoming_rows * rows);
/* The sequence, which must end before the first position, sees the cells. KVG_INVALID_ARGUMENT, with nothing changed, while rows are
   missing, and after kvg_kv_clear. */
KVG_API kvg_status kvg_kv_show(kvg_context * context, kvg_incoming * incoming, int64_t seq);
/* Cells that were not shown are empty again. */
KVG_API kvg_status kvg_kv_give_back(kvg_context * context, kvg_incoming * incoming);
/* From any thread. Cells that were neither shown nor given back are empty again after the context's next call. */
KVG_API void kvg_incoming_free(kvg_incoming * incoming);

/* ---- faults, for tests ---- */

/* In a library built with KVGRAPH_TEST_HOOKS: the `countdown`-th pass (1: the next) through `site` fails; 0 disarms.
   Sites: "cells", "build", "alloc", "compute", "shift-build", "shift-alloc", "shift-compute", "defrag-build",
   "defrag-alloc", "defrag-compute", "defrag-cells" (sort, after the rows of a step), "copy-build", "copy-alloc", "copy-compute",
   "load-write" (after the rows), "alloc-kept" (a small graph gets no memory of its own, and shares the others').
   Five more change what is computed, as long as `countdown` is not 0: "shift-skip" (K stays as it is), "shift-sign" (K turns
   the wrong way), "defrag-source" (each move reads the row beside its source), "lacks-rope" and "lacks-mul-mat" (no
   device but the CPU has that operation). "window": in models loaded meanwhile every second layer, from the first on, attends to
   `countdown` positions. KVG_UNSUPPORTED in any other library. */
KVG_API kvg_status kvg_test_fault(const char * site, int64_t countdown);

#ifdef __cplusplus
}
#endif

#endif
