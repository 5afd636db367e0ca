#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "distance.h"
#include "kvgraph.h"
#include "memory/kv_group.h"
#include "rotated.h"
#include "shift/dither.h"
#include "shift/k_shift.h"
#include "shift/on_device.h"

using namespace kvg;

namespace {

constexpr uint32_t N = 48; // cells
constexpr int32_t P0 = 200;
constexpr ggml_type TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0};

// A layer whose heads are rotated in their first n_rot dimensions only.
std::vector<layer_spec> partly_rotated(uint32_t head_dim, int n_rot, int mode) {
    layer_spec layer = {};
    layer.n_head = layer.n_head_kv = 3;
    layer.head_dim_k = layer.head_dim_v = head_dim;
    layer.rope.mode = mode;
    layer.rope.n_rot = n_rot;
    layer.rope.n_ctx_orig = 4096;
    layer.rope.freq_base = 10000.0f;
    layer.rope.freq_scale = layer.rope.attn_factor = 1.0f;
    std::vector<layer_spec> layers(2, layer);
    layers[1].kv_from = 1;
    return layers;
}

kv_homes on_cpu(size_t n_layers) {
    const std::vector<ggml_backend_dev_t> all(n_layers, cpu_device());
    return {all, all, {}};
}

// All layers of such a model on the CPU, ready to be used.
struct test_group {
    backends opened{{cpu_device()}};
    std::vector<layer_spec> layers;
    kv_group group;

    test_group(std::vector<layer_spec> specs, ggml_type type)
        : layers(std::move(specs)), group(make_groups(layers)[0], on_cpu(layers.size()), opened, N, 256, 1,
                                          {type, GGML_TYPE_F16, true}, /*reuses*/ false) {
        group.allocate();
        group.clear(true);
    }
};

// What a rotation by so many positions makes of heads, by its definition.
void rotate_heads(std::vector<float> & heads, const layer_spec & layer, int32_t by) {
    const int n_pairs = layer.rope.n_rot / 2;
    for (size_t head = 0; head < heads.size(); head += layer.head_dim_k) {
        for (int i = 0; i < n_pairs; ++i) {
            const double angle = by * std::pow(layer.rope.freq_base, -2.0 * i / layer.rope.n_rot);
            const bool neox = layer.rope.mode == GGML_ROPE_TYPE_NEOX;
            float & a = heads[head + static_cast<size_t>(neox ? i : 2 * i)];
            float & b = heads[head + static_cast<size_t>(neox ? i + n_pairs : 2 * i + 1)];
            const double x = a;
            const double y = b;
            a = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
            b = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
        }
    }
}

// Of one sequence, from P0 on.
void fill_cells(kv_group & group) {
    seq_set all = group.cells().make_set();
    all[0] = 1;
    for (uint32_t i = 0; i < N; ++i) {
        group.cells().put(i, P0 + static_cast<int32_t>(i), all);
    }
}

// Writes what the type keeps of K, mixed as the group wants it, into every layer.
void write(kv_group & group, const std::vector<float> & k) {
    std::vector<float> kept = k;
    if (group.part_of(0).hadamard_k) {
        group.part_of(0).hadamard_k->apply(kept.data(), kept.size());
    }
    const int64_t width = static_cast<int64_t>(k.size()) / N;
    std::vector<uint8_t> raw(ggml_row_size(group.types().k, width) * N);
    ggml_quantize_chunk(group.types().k, kept.data(), raw.data(), 0, N, width, nullptr);
    for (const uint32_t il : group.layers()) {
        ggml_backend_tensor_set(group.k(il), raw.data(), 0, raw.size());
    }
}

} // namespace

TEST_CASE("heads that are rotated in part are right in every type, whatever their size") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const ggml_type type : TYPES) {
        for (const uint32_t head_dim : {32u, 80u, 96u, 128u}) {
            for (const int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
                if (head_dim % ggml_blck_size(type) != 0) {
                    continue;
                }
                CAPTURE(std::string(ggml_type_name(type)));
                CAPTURE(head_dim);
                CAPTURE(mode);
                test_group test(partly_rotated(head_dim, 20, mode), type);
                kv_group & cache = test.group;
                CHECK((cache.part_of(0).hadamard_k != nullptr) == ggml_is_quantized(type));
                std::vector<float> k(size_t{N} * cache.spec().k_width());
                for (float & x : k) {
                    x = normal(random);
                }
                fill_cells(cache);
                write(cache, k);
                std::vector<float> read(k.size());
                cache.read(0, false, read.data());
                const double own = distance(read, k);

                cache.cells().apply(cache.cells().check_add(0, 0, -1, -150));
                const rotation_list list = settle(cache.cells(), false).rotated;
                CHECK(list.rows.size() == N);
                const std::vector<layer_rotation> layers = rotations_of(cache, test.layers, {});
                k_shift(cache, layers).run(2, list);
                CHECK(cache.cells().n_shifted() == 0);
                rotate_heads(k, test.layers[0], -150);
                for (const uint32_t il : cache.layers()) {
                    cache.read(il, false, read.data());
                    CHECK(distance(read, k) <= 1.5 * own + 1e-5);
                }
            }
        }
    }
}

TEST_CASE("dither never adds up, is less than half a step of what is usual, and differs") {
    for (const ggml_type type : TYPES) {
        CAPTURE(std::string(ggml_type_name(type)));
        // of floats half the step of 1; of blocks half the step where the greatest is 2.5 root mean squares
        const double limit = type == GGML_TYPE_F32    ? 0
                             : type == GGML_TYPE_F16  ? 0.5 * 0x1p-10
                             : type == GGML_TYPE_BF16 ? 0.5 * 0x1p-7
                             : type == GGML_TYPE_Q8_0 ? 0.5 * 2.5 / 127
                             : type == GGML_TYPE_Q5_1 ? 0.5 * 4.5 / 31
                             : type == GGML_TYPE_Q5_0 ? 0.5 * 2.5 / 16
                             : type == GGML_TYPE_Q4_1 ? 0.5 * 4.5 / 15
                                                      : 0.5 * 2.5 / 8;
        const uint32_t n_pairs = 128;
        double gain = 1;
        double greatest = 0;
        std::vector<double> angles(n_pairs);
        CHECK(step_dither(0, 1, type, n_pairs).gain == 1);
        CHECK(step_dither(0, 1, type, n_pairs).angles.empty());
        uint8_t from = 1;
        for (int n = 0; n < 1000; ++n) {
            const auto to = static_cast<uint8_t>(from == 255 ? 2 : from + 1);
            const dither_step step = step_dither(from, to, type, n_pairs);
            from = to;
            gain *= step.gain;
            greatest = std::max(greatest, std::abs(gain - 1));
            REQUIRE(step.angles.size() == (ggml_is_quantized(type) ? n_pairs : 0));
            for (size_t i = 0; i < step.angles.size(); ++i) {
                CHECK(std::isfinite(1 / step.angles[i]));
                angles[i] += step.angles[i];
                greatest = std::max(greatest, std::abs(angles[i]));
            }
        }
        CHECK(greatest <= limit + 1e-4); // rounded to F32 a thousand times
        CHECK(greatest >= limit / 2);
        const dither_step back = step_dither(from, 1, type, n_pairs);
        CHECK(std::abs(gain * back.gain - 1) <= 1e-4);
        for (size_t i = 0; i < back.angles.size(); ++i) {
            CHECK(std::abs(angles[i] + back.angles[i]) <= 1e-5);
        }
    }
}

TEST_CASE("saved states depend on these dithers") { // by docs/state-format.md, reckoned elsewhere
    CHECK(step_dither(1, 2, GGML_TYPE_F16, 1).gain - 1 == doctest::Approx(-1.021336e-04).epsilon(1e-3));
    CHECK(step_dither(1, 2, GGML_TYPE_Q8_0, 4).angles[3] == doctest::Approx(0.00285655).epsilon(1e-5));
    CHECK(step_dither(255, 1, GGML_TYPE_Q4_1, 4).angles[0] == doctest::Approx(-0.00837210).epsilon(1e-5));
}

// The CPU has every operation of the graph that other devices run.
TEST_CASE("the graph rotates as the CPU's loop does, runs in place and rows, again and again") {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (const ggml_type type : TYPES) {
        for (const uint32_t head_dim : {32u, 96u}) {
            CAPTURE(std::string(ggml_type_name(type)));
            CAPTURE(head_dim);
            const std::vector<layer_spec> layers = partly_rotated(head_dim, 20, GGML_ROPE_TYPE_NEOX);
            std::vector<float> k(size_t{N} * layers[0].k_width());
            for (float & x : k) {
                x = normal(random);
            }
            std::vector<std::vector<float>> results;
            for (const bool by_graph : {false, true}) {
                test_group test(layers, type);
                kv_group & cache = test.group;
                fill_cells(cache);
                write(cache, k);
                for (const int32_t from : {0, 10, 20, 0}) { // some more often than others
                    cache.cells().apply(cache.cells().check_add(0, P0 + from, -1, 150));
                    cache.cells().apply(cache.cells().check_add(0, P0 + from + 150, -1, -147));
                    const rotation_list list = settle(cache.cells(), false).rotated;
                    const std::vector<layer_rotation> how = rotations_of(cache, test.layers, {});
                    if (!by_graph) {
                        k_shift(cache, how).run(2, list);
                        continue;
                    }
                    std::vector<update_graph> graphs;
                    graphs.push_back(rotation_graph(cache, cache.parts().front(), how, list));
                    CHECK(run_graphs(cache, graphs) == nullptr);
                    rotate(cache.cells(), list);
                }
                results.emplace_back(k.size());
                cache.read(1, false, results.back().data());
            }
            CHECK(distance(results[0], k) > 0.1);
            // a rounding here and there may fall otherwise
            CHECK(distance(results[1], results[0]) <= (type == GGML_TYPE_F32 ? 1e-5 : 1e-2));
        }
    }
}

TEST_CASE("each layer is rotated by its own base, and not at all without rope: in place, by a graph, in copies and as floats") {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<layer_spec> layers(4, partly_rotated(32, 20, GGML_ROPE_TYPE_NEOX)[0]);
    for (uint32_t il = 0; il < layers.size(); ++il) {
        layers[il].kv_from = il;
    }
    layers[1].rope.freq_base = 500;
    layers[2].rope.n_rot = 0;
    layers[3].rope.n_rot = 32;
    std::vector<float> k(size_t{N} * layers[0].k_width());
    for (float & x : k) {
        x = normal(random);
    }
    std::vector<std::vector<float>> expected;
    for (const layer_spec & layer : layers) {
        expected.push_back(k);
        rotate_heads(expected.back(), layer, 150);
    }
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
        for (const char * by : {"cpu", "graph", "copies", "floats"}) {
            CAPTURE(std::string(ggml_type_name(type)));
            CAPTURE(std::string(by));
            test_group test(layers, type);
            kv_group & cache = test.group;
            fill_cells(cache);
            write(cache, k);
            const std::vector<layer_rotation> how = rotations_of(cache, test.layers, {});
            cache.cells().apply(cache.cells().check_add(0, 0, -1, 150));
            k_shift shift(cache, how);
            const rotation_list list = settle(cache.cells(), false).rotated;
            if (by == std::string("cpu")) {
                shift.run(2, list);
            } else if (by == std::string("graph")) {
                std::vector<update_graph> graphs;
                graphs.push_back(rotation_graph(cache, cache.parts().front(), how, list));
                CHECK(run_graphs(cache, graphs) == nullptr);
            } else if (by == std::string("copies")) {
                const numbers all = rows_of(list);
                std::vector<uint8_t> rows(cache.cell_bytes() * N);
                std::vector<uint8_t> dither(N);
                const layer_range range = {0, layers.size()};
                read_rows(cache, range, all, rows.data(), 1);
                shift.rotate_copies(all, range, rows.data(), dither.data(), 2);
                CHECK(dither == std::vector<uint8_t>(N, 1));
                write_rows(cache, range, all, rows.data(), 1);
            }
            for (uint32_t il = 0; il < layers.size(); ++il) {
                std::vector<float> read(k.size());
                cache.read(il, false, read.data());
                if (by == std::string("floats")) {
                    shift.rotate_floats(il, read.data());
                }
                CAPTURE(il);
                CHECK(distance(read, expected[il]) <= (type == GGML_TYPE_F32 ? 1e-5 : 0.015));
            }
        }
    }
}
