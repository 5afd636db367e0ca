#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends.h"
#include "cpu/kernel.h"
#include "device.h"
#include "graph/expert_product.h"
#include "graph/product.h"
#include "graph/rounding.h"
#include "host_memory.h"
#include "team.h"

using namespace kvg;

namespace {

struct sizes {
    int64_t n_in;
    int64_t n_ff;
    int64_t n_expert;
    int64_t n_used;
    int64_t n_tokens;
};

std::vector<float> random_floats(int64_t n, std::mt19937 & random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    std::generate(x.begin(), x.end(), [&] { return normal(random); });
    return x;
}

// A matrix for each expert, with a scale and a bias, and what products with it are in F64.
struct matrices {
    ggml_type type;
    int64_t n_in, n_out, n_expert;
    std::vector<uint8_t> raw;
    std::vector<float> weights; // as the raw ones are read
    std::vector<float> scale;   // (n_expert)
    std::vector<float> bias;    // (n_out, n_expert)

    matrices(ggml_type type, int64_t n_in, int64_t n_out, int64_t n_expert, std::mt19937 & random)
        : type(type), n_in(n_in), n_out(n_out), n_expert(n_expert), raw(ggml_row_size(type, n_in) * n_out * n_expert),
          weights(random_floats(n_in * n_out * n_expert, random)), scale(random_floats(n_expert, random)),
          bias(random_floats(n_out * n_expert, random)) {
        ggml_quantize_chunk(type, weights.data(), raw.data(), 0, n_out * n_expert, n_in, nullptr);
        ggml_get_type_traits(type)->to_float(raw.data(), weights.data(), static_cast<int64_t>(weights.size()));
    }
    double product(int64_t expert, int64_t row, const double * x) const {
        double sum = 0;
        for (int64_t i = 0; i < n_in; ++i) {
            sum += x[i] * weights[static_cast<size_t>((expert * n_out + row) * n_in + i)];
        }
        return sum;
    }
    double whole(int64_t expert, int64_t row, const double * x) const {
        return product(expert, row, x) * scale[static_cast<size_t>(expert)] + bias[static_cast<size_t>(expert * n_out + row)];
    }
};

// Tensors on the CPU, and graphs over them.
class on_cpu {
public:
    explicit on_cpu(int n_threads) : backends_({cpu_device()}) { backends_.set_threads(n_threads); }

    ggml_tensor * tensor(ggml_type type, const void * data, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        contexts_.push_back(new_ggml_context(ggml_tensor_overhead()));
        ggml_tensor * t = ggml_new_tensor_3d(contexts_.back().get(), type, ne0, ne1, ne2);
        buffers_.emplace_back(ggml_backend_alloc_ctx_tensors(contexts_.back().get(), backends_.cpu()));
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
        return t;
    }
    expert_matrix whole(const matrices & m) {
        return {tensor(m.type, m.raw.data(), m.n_in, m.n_out, m.n_expert), tensor(GGML_TYPE_F32, m.scale.data(), m.n_expert),
                tensor(GGML_TYPE_F32, m.bias.data(), m.n_out, m.n_expert)};
    }
    ggml_context * nodes() { return nodes_.get(); }
    std::vector<float> run(ggml_tensor * out) {
        ggml_cgraph * graph = ggml_new_graph(nodes_.get());
        ggml_build_forward_expand(graph, out);
        buffers_.emplace_back(ggml_backend_alloc_ctx_tensors(nodes_.get(), backends_.cpu()));
        REQUIRE(ggml_backend_graph_compute(backends_.cpu(), graph) == GGML_STATUS_SUCCESS);
        std::vector<float> result(static_cast<size_t>(ggml_nelements(out)));
        ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
        return result;
    }

private:
    backends backends_;
    std::vector<ggml_context_ptr> contexts_;
    ggml_context_ptr nodes_ = new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead());
    std::vector<ggml_backend_buffer_ptr> buffers_;
};

// Tokens, and which experts they go to: some to the same, some experts get none.
struct tokens {
    sizes s;
    std::vector<float> x;       // (n_in, n_tokens)
    std::vector<int32_t> ids;   // (n_used, n_tokens)
    std::vector<float> weights; // (n_used, n_tokens)

    tokens(const sizes & s, std::mt19937 & random)
        : s(s), x(static_cast<size_t>(s.n_in * s.n_tokens)), weights(random_floats(s.n_used * s.n_tokens, random)) {
        std::uniform_int_distribution<int> whole(-127, 127);
        std::generate(x.begin(), x.end(), [&] { return static_cast<float>(whole(random)); });
        for (size_t i = 0; i < x.size(); i += 32) {
            x[i] = 127; // so that rounding to 8 bits changes nothing
        }
        std::vector<int32_t> all(static_cast<size_t>(s.n_expert - 1)); // the last one gets none
        std::iota(all.begin(), all.end(), 0);
        for (int64_t t = 0; t < s.n_tokens; ++t) {
            std::shuffle(all.begin() + (t % 3 == 0 ? 1 : 0), all.end(), random);
            ids.insert(ids.end(), all.begin(), all.begin() + s.n_used);
        }
    }
    tokens some(int64_t first, int64_t n) const {
        tokens part = *this;
        const auto cut = [&](auto & of, int64_t width) { of = {of.begin() + first * width, of.begin() + (first + n) * width}; };
        part.s.n_tokens = n;
        cut(part.x, s.n_in);
        cut(part.ids, s.n_used);
        cut(part.weights, s.n_used);
        return part;
    }
    ggml_tensor * rows(on_cpu & cpu) const { return cpu.tensor(GGML_TYPE_F32, x.data(), s.n_in, 1, s.n_tokens); }
    ggml_tensor * experts(on_cpu & cpu) const { return cpu.tensor(GGML_TYPE_I32, ids.data(), s.n_used, s.n_tokens); }
    std::vector<double> row(int64_t token) const {
        const auto begin = x.begin() + token * s.n_in;
        return {begin, begin + s.n_in};
    }
};

// (n_out, n_used, n_tokens)
std::vector<float> product(const tokens & t, const matrices & m, int n_threads) {
    on_cpu cpu(n_threads);
    ggml_tensor * experts = t.experts(cpu);
    const expert_matrix whole = cpu.whole(m);
    ggml_tensor * x = t.rows(cpu);
    const row_form & form = *form_of_experts(whole.weight, x);
    ggml_tensor * order = expert_order(cpu.nodes(), experts, m.n_expert);
    ggml_tensor * rows = rounded_in_order(cpu.nodes(), x, experts, order, form);
    return cpu.run(by_tokens(cpu.nodes(), multiply_in_order(cpu.nodes(), whole, rows, order), experts, order));
}

struct experts_of {
    matrices gate, up, down;
    experts_of(ggml_type type, const sizes & s, std::mt19937 & random)
        : gate(type, s.n_in, s.n_ff, s.n_expert, random), up(type, s.n_in, s.n_ff, s.n_expert, random),
          down(type, s.n_ff, s.n_in, s.n_expert, random) {}
};

// (n_in, n_tokens)
std::vector<float> mixture(const tokens & t, const experts_of & of, int n_threads) {
    on_cpu cpu(n_threads);
    ggml_tensor * experts = t.experts(cpu);
    ggml_tensor * x = t.rows(cpu);
    ggml_tensor * weights = cpu.tensor(GGML_TYPE_F32, t.weights.data(), 1, t.s.n_used, t.s.n_tokens);
    const expert_matrix gate = cpu.whole(of.gate);
    const expert_matrix up = cpu.whole(of.up);
    const expert_matrix down = cpu.whole(of.down);
    ggml_context * ctx = cpu.nodes();
    const row_form & form = *form_of_experts(gate.weight, x);
    ggml_tensor * order = expert_order(ctx, experts, t.s.n_expert);
    ggml_tensor * rows = rounded_in_order(ctx, x, experts, order, form);
    ggml_tensor * y = gate_in_order(ctx, gate, up, rows, order, kernels_here()[0]->feed_forward.swiglu_oai);
    y = multiply_in_order(ctx, down, rounded(ctx, y, form), order);
    return cpu.run(sum_by_tokens(ctx, y, experts, order, weights));
}

std::vector<double> naive_mixture(const tokens & t, const experts_of & of) {
    std::vector<double> out;
    for (int64_t token = 0; token < t.s.n_tokens; ++token) {
        const std::vector<double> x = t.row(token);
        std::vector<double> sum(static_cast<size_t>(t.s.n_in));
        for (int64_t i = 0; i < t.s.n_used; ++i) {
            const auto pair = static_cast<size_t>(token * t.s.n_used + i);
            std::vector<double> gated;
            for (int64_t k = 0; k < t.s.n_ff; ++k) {
                const double gate = std::fmin(of.gate.whole(t.ids[pair], k, x.data()), 7);
                const double up = std::fmax(-7, std::fmin(of.up.whole(t.ids[pair], k, x.data()), 7));
                gated.push_back(gate / (1 + std::exp(-1.702 * gate)) * (up + 1));
            }
            for (int64_t k = 0; k < t.s.n_in; ++k) {
                sum[static_cast<size_t>(k)] += t.weights[pair] * of.down.whole(t.ids[pair], k, gated.data());
            }
        }
        out.insert(out.end(), sum.begin(), sum.end());
    }
    return out;
}

double nmse(const std::vector<float> & got, const std::vector<double> & wanted) {
    REQUIRE(got.size() == wanted.size());
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return error / size;
}

bool same(const std::vector<float> & a, const float * b) { return memcmp(a.data(), b, a.size() * sizeof(float)) == 0; }

template <class F> void for_each_type(F test) {
    for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
        CAPTURE(std::string(ggml_type_name(type)));
        if (product_kernel_for(type)) {
            test(type);
        } else {
            MESSAGE("this CPU has no kernel for it");
        }
    }
}

} // namespace

TEST_CASE("a token's products with the matrices of its experts, with scale and bias, are those of F64") {
    for_each_type([](ggml_type type) {
        for (const sizes & s : {sizes{256, 40, 8, 3, 50}, sizes{256, 300, 40, 6, 1}, sizes{512, 17, 3, 2, 200}}) {
            CAPTURE(s.n_tokens);
            std::mt19937 random(1);
            const tokens t(s, random);
            const matrices m(type, s.n_in, s.n_ff, s.n_expert, random);
            std::vector<double> wanted;
            for (size_t pair = 0; pair < t.ids.size(); ++pair) {
                const std::vector<double> x = t.row(static_cast<int64_t>(pair) / s.n_used);
                for (int64_t k = 0; k < s.n_ff; ++k) {
                    wanted.push_back(m.whole(t.ids[pair], k, x.data()));
                }
            }
            CHECK(nmse(product(t, m, 1), wanted) < 1e-12);
        }
    });
}

TEST_CASE("a row of each pair's own: the down product alone") {
    for_each_type([](ggml_type type) {
        std::mt19937 random(2);
        const sizes s = {256, 40, 8, 3, 20};
        const tokens pairs({s.n_in, s.n_ff, s.n_expert, 1, s.n_tokens * s.n_used}, random); // a token for each
        const tokens t(s, random);
        const matrices m(type, s.n_in, s.n_ff, s.n_expert, random);
        on_cpu cpu(2);
        ggml_tensor * experts = t.experts(cpu);
        ggml_tensor * x = cpu.tensor(GGML_TYPE_F32, pairs.x.data(), s.n_in, s.n_used, s.n_tokens);
        const expert_matrix plain = {cpu.whole(m).weight};
        ggml_tensor * order = expert_order(cpu.nodes(), experts, s.n_expert);
        ggml_tensor * rows = rounded_in_order(cpu.nodes(), x, experts, order, *form_of_experts(plain.weight, x));
        ggml_tensor * y = multiply_in_order(cpu.nodes(), plain, rows, order);
        std::vector<double> wanted;
        for (size_t pair = 0; pair < t.ids.size(); ++pair) {
            const std::vector<double> row = pairs.row(static_cast<int64_t>(pair));
            for (int64_t k = 0; k < s.n_ff; ++k) {
                wanted.push_back(m.product(t.ids[pair], k, row.data()));
            }
        }
        CHECK(nmse(cpu.run(by_tokens(cpu.nodes(), y, experts, order)), wanted) < 1e-12);
    });
}

TEST_CASE("gate, up, activation, down and the sum by the router's weights are those of F64") {
    for_each_type([](ggml_type type) {
        for (const sizes & s : {sizes{256, 256, 8, 3, 30}, sizes{512, 256, 12, 4, 1}}) {
            std::mt19937 random(3);
            tokens t(s, random);
            std::for_each(t.x.begin(), t.x.end(), [](float & x) { x /= 512; }); // gates of either sign, some clamped
            const experts_of of(type, s, random);
            CHECK(nmse(mixture(t, of, 1), naive_mixture(t, of)) < 1e-3); // the down product's rows are rounded
        }
    });
}

TEST_CASE("what a token gets depends neither on other tokens nor on the number of threads, to the last bit") {
    for_each_type([](ggml_type type) {
        const sizes s = {256, 512, 8, 3, 90};
        std::mt19937 random(4);
        const tokens t(s, random);
        const experts_of of(type, s, random);
        const std::vector<float> all = mixture(t, of, 1);
        for (const int n_threads : {2, 3, 7}) {
            CHECK(same(mixture(t, of, n_threads), all.data()));
            const team_share team(n_threads);
            CHECK(same(mixture(t, of, 1), all.data()));
            CHECK(same(mixture(t.some(5, 1), of, 1), &all[static_cast<size_t>(5 * s.n_in)]));
        }
        for (const int64_t n : {1, 2, 9, 40}) {
            for (int64_t first = 0; first + n <= s.n_tokens; first += 37) {
                CHECK(same(mixture(t.some(first, n), of, 2), &all[static_cast<size_t>(first * s.n_in)]));
            }
        }
    });
}

TEST_CASE("nodes that multiply are known, and no others") {
    for_each_type([](ggml_type type) {
        std::mt19937 random(6);
        const sizes s = {256, 32, 4, 2, 3};
        const tokens t(s, random);
        on_cpu cpu(1);
        ggml_tensor * experts = t.experts(cpu);
        ggml_tensor * x = t.rows(cpu);
        const expert_matrix m = {cpu.whole(matrices(type, s.n_in, s.n_ff, s.n_expert, random)).weight};
        ggml_tensor * order = expert_order(cpu.nodes(), experts, s.n_expert);
        ggml_tensor * rows = rounded_in_order(cpu.nodes(), x, experts, order, *form_of_experts(m.weight, x));
        ggml_tensor * y = multiply_in_order(cpu.nodes(), m, rows, order);
        CHECK(is_expert_product(y));
        const gate_function gate = kernels_here()[0]->feed_forward.swiglu;
        CHECK(is_expert_product(gate_in_order(cpu.nodes(), m, m, rows, order, gate)));
        for (const ggml_tensor * other : {x, order, rows, by_tokens(cpu.nodes(), y, experts, order),
                                          sum_by_tokens(cpu.nodes(), y, experts, order, nullptr)}) {
            CHECK(!is_expert_product(other));
        }
    });
}

TEST_CASE("an expert that no token chose is not read") {
    for_each_type([](ggml_type type) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const sizes s = {512, 0, 16, 2, 3};
        const int64_t n_out = static_cast<int64_t>(page) / 32; // whole pages for each expert, of every type
        std::mt19937 random(5);
        const tokens t({s.n_in, n_out, s.n_expert, s.n_used, s.n_tokens}, random);
        const matrices m(type, s.n_in, n_out, s.n_expert, random);
        void * memory = mmap(nullptr, m.raw.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        memcpy(memory, m.raw.data(), m.raw.size());
        const size_t n_bytes = m.raw.size() / static_cast<size_t>(s.n_expert);
        REQUIRE(n_bytes % page == 0);
        int n_hidden = 0;
        for (int32_t e = 0; e < s.n_expert; ++e) {
            if (std::find(t.ids.begin(), t.ids.end(), e) == t.ids.end()) {
                REQUIRE(mprotect(static_cast<char *>(memory) + static_cast<size_t>(e) * n_bytes, n_bytes, PROT_NONE) == 0);
                ++n_hidden;
            }
        }
        CHECK(n_hidden >= s.n_expert - s.n_used * s.n_tokens);
        {
            on_cpu cpu(2);
            ggml_context_ptr owner = new_ggml_context(ggml_tensor_overhead());
            ggml_tensor * weight = ggml_new_tensor_3d(owner.get(), type, s.n_in, n_out, s.n_expert);
            const ggml_backend_buffer_ptr there(
                ggml_backend_dev_buffer_from_host_ptr(cpu_device(), memory, m.raw.size(), m.raw.size()));
            REQUIRE(ggml_backend_tensor_alloc(there.get(), weight, memory) == GGML_STATUS_SUCCESS);
            ggml_tensor * experts = t.experts(cpu);
            ggml_tensor * x = t.rows(cpu);
            ggml_tensor * order = expert_order(cpu.nodes(), experts, s.n_expert);
            ggml_tensor * rows = rounded_in_order(cpu.nodes(), x, experts, order, *form_of_experts(weight, x));
            const std::vector<float> y = cpu.run(multiply_in_order(cpu.nodes(), {weight}, rows, order));
            CHECK(std::all_of(y.begin(), y.end(), [](float each) { return std::isfinite(each); }));
        }
        munmap(memory, m.raw.size());
    });
}
