/*
 * The C interface from C: this file includes kvgraph.h and the C library alone, and tells a story whose text llama2.c published.
 *
 * usage: c_program MODEL.gguf STORY.txt
 */
#include <kvgraph.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BEGIN = 1,
    N_TOKENS = 256,
    TEXT_SIZE = 64 * N_TOKENS
};

static void check(kvg_status status, const char * what) {
    if (status != KVG_OK) {
        fprintf(stderr, "%s: status %d: %s\n", what, (int) status, kvg_last_error());
        exit(1);
    }
}

static void need(int truth, const char * what) {
    if (!truth) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}

/* Index of a metadata key. */
static uint64_t find_key(const kvg_gguf * file, const char * key) {
    for (uint64_t i = 0; i < kvg_gguf_n_kv(file); ++i) {
        kvg_gguf_kv kv = {.struct_size = sizeof kv};
        check(kvg_gguf_get_kv(file, i, &kv), "kvg_gguf_get_kv");
        if (strcmp(kv.key, key) == 0) {
            return i;
        }
    }
    need(0, key);
    return 0;
}

/* Appends what a SentencePiece token stands for: U+2581 is a blank, "<0x0A>" a byte. */
static void append_piece(char * text, const char * piece, uint64_t length) {
    size_t end = strlen(text);
    if (length == 6 && memcmp(piece, "<0x", 3) == 0) {
        text[end++] = (char) strtol(piece + 3, NULL, 16);
        length = 0;
    }
    for (uint64_t i = 0; i < length;) {
        const int blank = length - i >= 3 && memcmp(piece + i, "\xe2\x96\x81", 3) == 0;
        need(end + 1 < TEXT_SIZE, "the text fits");
        text[end++] = blank ? ' ' : piece[i];
        i += blank ? 3 : 1;
    }
    text[end] = '\0';
}

/* Whether a file begins with this text, but for blanks before it. */
static int file_begins_with(const char * path, const char * text) {
    static char story[TEXT_SIZE];
    FILE * file = fopen(path, "rb");
    need(file != NULL, path);
    const size_t n = fread(story, 1, sizeof story - 1, file);
    story[n] = '\0';
    fclose(file);
    text += strspn(text, " ");
    return strncmp(story, text, strlen(text)) == 0;
}

static kvg_context * open_context(const char * path, kvg_output * output) {
    kvg_model * model = NULL;
    const kvg_model_params where = {.struct_size = sizeof where, .devices = "cpu", .n_gpu_layers = -1};
    need(kvg_model_load("/nowhere/model.gguf", &where, &model) == KVG_NOT_FOUND, "a missing file is KVG_NOT_FOUND");
    need(strstr(kvg_last_error(), "/nowhere/model.gguf") != NULL, "the message names the file");
    check(kvg_model_load(path, &where, &model), "kvg_model_load");

    kvg_context_params params = {
        .struct_size = sizeof params, .n_ctx = N_TOKENS, .n_batch = 16, .n_ubatch = 16, .n_seq_max = 1};
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = KVG_TYPE_F16;
    params.flash_attn = KVG_FLASH_ATTN_AUTO;
    params.defrag_threshold = -1.0f;
    params.device_layers = 2;
    kvg_context * context = NULL;
    check(kvg_context_new(model, &params, &context), "kvg_context_new");

    kvg_model_info info = {.struct_size = sizeof info};
    check(kvg_model_get_info(model, &info), "kvg_model_get_info");
    output->logits = malloc((size_t) info.n_vocab * sizeof(float));
    need(output->logits != NULL, "memory for a row of logits");
    kvg_model_free(model); /* the context keeps the weights */
    return context;
}

/* Fills the cache with the token that begins every text and the likeliest token each time; returns the text. */
static const char * tell(kvg_context * context, kvg_output * output) {
    static char text[TEXT_SIZE];
    const kvg_gguf * file = kvg_context_gguf(context);
    const uint64_t tokens = find_key(file, "tokenizer.ggml.tokens");
    const int32_t token = BEGIN, pos = 0, seq_begin[] = {0, 1}, seq_id = 0;
    const uint8_t wanted = 1;
    const kvg_batch batch = {sizeof batch, 1, &token, &pos, seq_begin, &seq_id, &wanted, NULL, NULL, 0, 0, 0};
    check(kvg_decode(context, &batch, output), "kvg_decode");
    for (int i = 1; i < N_TOKENS; ++i) {
        const char * piece;
        uint64_t length;
        check(kvg_gguf_get_string(file, tokens, (uint64_t) output->score->best, &piece, &length), "kvg_gguf_get_string");
        append_piece(text, piece, length);
        check(kvg_append(context, 0, output->score->best, output), "kvg_append");
        need(output->n_written == 1, "one row was written");
    }
    return text;
}

/* A full cache refuses a token and loses nothing; where old tokens are given up and the others moved down, the text goes on. */
static void go_on(kvg_context * context, kvg_output * output) {
    const int32_t best = output->score->best;
    need(kvg_append(context, 0, best, output) == KVG_CACHE_FULL, "a full cache is KVG_CACHE_FULL");
    need(kvg_kv_seq_rm(context, 7, 0, -1) == KVG_INVALID_ARGUMENT, "a sequence that can't be is KVG_INVALID_ARGUMENT");
    check(kvg_kv_seq_rm(context, 0, 1, 33), "kvg_kv_seq_rm");
    check(kvg_kv_seq_add(context, 0, 33, -1, -32), "kvg_kv_seq_add");
    kvg_update_stats done = {.struct_size = sizeof done};
    check(kvg_kv_update(context, &done), "kvg_kv_update");
    need(done.shifted_cells == N_TOKENS - 33, "each cell after the gap was shifted");
    check(kvg_append(context, 0, best, output), "kvg_append after a shift");
    int64_t last = 0;
    check(kvg_kv_seq_pos_max(context, 0, &last), "kvg_kv_seq_pos_max");
    need(last == N_TOKENS - 32, "the sequence ends one token after where it was moved to");
}

int main(int argc, char ** argv) {
    need(argc == 3, "two arguments: a model and its story");
    kvg_score score;
    kvg_output output = {.struct_size = sizeof output, .score = &score, .n_rows = 1};
    kvg_context * context = open_context(argv[1], &output);
    const char * text = tell(context, &output);
    need(strlen(text) > 400 && file_begins_with(argv[2], text), "the text is the one that llama2.c published");
    go_on(context, &output);
    free(output.logits);
    kvg_context_free(context);
    return 0;
}
