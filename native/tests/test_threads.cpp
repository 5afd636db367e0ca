// Threads on the C interface, for ThreadSanitizer above all (`make races`): what different threads may do at the same time, and what
// ggml's threads do in one graph. The logits must be those of one thread. Two threads on one context are a matter of Python's lock
// (tests/model/api/test_lifetimes.py).
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kvgraph.h"

namespace {

constexpr int64_t N_VOCAB = 671; // of the embedded model, as load() makes sure
constexpr int FEW = 150;
constexpr int MANY = 1200; // so many cells that attention splits them among threads

template <class T, void (*free)(T *)> struct with {
    void operator()(T * handle) const { free(handle); }
};
using model_ptr = std::unique_ptr<kvg_model, with<kvg_model, kvg_model_free>>;
using context_ptr = std::unique_ptr<kvg_context, with<kvg_context, kvg_context_free>>;

// doctest's assertions take locks, so that ThreadSanitizer would see an order where there is none: threads throw instead
void must(kvg_status status) {
    if (status != KVG_OK) {
        throw std::runtime_error(kvg_last_error());
    }
}

model_ptr load() {
    kvg_model_params params = {};
    params.struct_size = sizeof params;
    params.devices = "cpu";
    params.n_gpu_layers = -1;
    kvg_model * model = nullptr;
    must(kvg_model_load(KVGRAPH_MODEL, &params, &model));
    model_ptr owner(model);
    kvg_model_info info = {};
    info.struct_size = sizeof info;
    must(kvg_model_get_info(model, &info));
    if (info.n_vocab != N_VOCAB) {
        throw std::runtime_error("another model: " + std::to_string(info.n_vocab) + " tokens");
    }
    return owner;
}

context_ptr open(kvg_model * model, int64_t n_threads, kvg_type type = KVG_TYPE_F16) {
    kvg_context_params params = {};
    params.struct_size = sizeof params;
    params.n_ctx = MANY + 20;
    params.n_batch = MANY;
    params.n_ubatch = 48; // few enough tokens that their cells are split
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = n_threads;
    params.type_k = params.type_v = type;
    params.flash_attn = KVG_FLASH_ATTN_AUTO;
    params.hadamard = 1;
    params.defrag_threshold = 0.1f;
    params.device_layers = 2; // as Python does; checked, whatever kv_tier is
    kvg_context * context = nullptr;
    must(kvg_context_new(model, &params, &context));
    return context_ptr(context);
}

// Decodes a text (each `text` another), gives up a part of it, and appends single tokens: the last one's logits.
std::vector<float> tell(kvg_context * context, int32_t text, int n_tokens = FEW) {
    std::vector<float> logits(N_VOCAB);
    kvg_output output = {};
    output.struct_size = sizeof output;
    output.logits = logits.data();
    output.n_rows = 1;
    std::vector<int32_t> tokens(n_tokens), pos(n_tokens), begin(n_tokens + 1), seqs(n_tokens);
    std::vector<uint8_t> wanted(n_tokens);
    for (int i = 0; i < n_tokens; ++i) {
        tokens[i] = 1 + (i * 37 + text) % 500;
        pos[i] = i;
        begin[i + 1] = i + 1;
    }
    wanted.back() = 1;
    const kvg_batch batch = {
        sizeof batch, n_tokens, tokens.data(), pos.data(), begin.data(), seqs.data(), wanted.data(), nullptr, nullptr, 0, 0, 0};
    must(kvg_decode(context, &batch, &output));
    must(kvg_kv_seq_rm(context, 0, 4, 70));
    must(kvg_kv_seq_add(context, 0, 70, -1, -66));
    must(kvg_kv_update(context, nullptr));
    for (int i = 0; i < 20; ++i) {
        must(kvg_append(context, 0, 1 + (i * 11) % 500, &output));
    }
    return logits;
}

std::vector<float> alone(kvg_model * model, int32_t text) { return tell(open(model, 1).get(), text); }

void at_once(const std::vector<std::function<void()>> & jobs) {
    std::vector<std::string> errors(jobs.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < jobs.size(); ++i) {
        threads.emplace_back([&, i] {
            try {
                jobs[i]();
            } catch (const std::exception & e) {
                errors[i] = e.what();
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    for (const std::string & error : errors) {
        CHECK(error == "");
    }
}

void check_same(const std::vector<float> & a, const std::vector<float> & b) {
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i) {
        CHECK(a[i] == doctest::Approx(b[i]).epsilon(0.01));
    }
}

} // namespace

TEST_CASE("two contexts of one model at the same time") {
    model_ptr model = load();
    const std::vector<float> expected[] = {alone(model.get(), 0), alone(model.get(), 1)};
    std::vector<float> logits[2];
    std::vector<std::function<void()>> jobs;
    for (int32_t i = 0; i < 2; ++i) {
        jobs.push_back([&, i] { logits[i] = tell(open(model.get(), 1).get(), i); });
    }
    at_once(jobs);
    for (int i = 0; i < 2; ++i) {
        check_same(logits[i], expected[i]);
    }
}

TEST_CASE("models are loaded, used and freed by several threads at the same time") {
    const auto job = [] {
        const model_ptr model = load();
        const context_ptr context = open(model.get(), 1, KVG_TYPE_Q8_0);
        tell(context.get(), 0);
    };
    at_once({job, job, job});
}

TEST_CASE("ggml's threads in one graph, our attention and our rows among them") {
    const model_ptr model = load();
    for (const kvg_type type : {KVG_TYPE_F32, KVG_TYPE_F16, KVG_TYPE_Q8_0}) {
        const std::vector<float> one = tell(open(model.get(), 1, type).get(), 0, MANY);
        check_same(tell(open(model.get(), 3, type).get(), 0, MANY), one);
    }
}
