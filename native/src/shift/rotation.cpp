#include "shift/rotation.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"
#include "shift/dither.h"

namespace kvg {

namespace {

// Every device has the same frequency factors, so it is enough to compare whether there are any.
bool have_same_angles(const layer_rotation & a, const layer_rotation & b) {
    return a.rope == b.rope && (a.freq_factors != nullptr) == (b.freq_factors != nullptr);
}

std::vector<float> make_table(const layer_rotation & how, const std::vector<row_rotation> & rotations, ggml_type type) {
    std::vector<float> table;
    const std::vector<double> angles = rope_angles(how.freq_factors, how.rope);
    for (const row_rotation & r : rotations) {
        const dither_step step = step_dither(r.from, r.to, type, static_cast<uint32_t>(angles.size()));
        for (size_t i = 0; i < 2 * angles.size(); ++i) {
            const size_t pair = i % angles.size();
            const double angle = r.by * angles[pair] + (step.angles.empty() ? 0.0f : step.angles[pair]);
            table.push_back(static_cast<float>(step.gain * (i < angles.size() ? std::cos(angle) : std::sin(angle))));
        }
    }
    return table;
}

} // namespace

std::vector<layer_rotation> rotations_of(const kv_group & group, const std::vector<layer_spec> & layers,
                                         const device_factors & factors) {
    std::vector<layer_rotation> out(layers.size());
    for (const uint32_t il : group.layers()) {
        const kv_part & part = group.part_of(il);
        const auto found = layers[il].rope.with_factors ? factors.find(part.device) : factors.end();
        out[il] = {layers[il].rope, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
    }
    return out;
}

const float * rotation_tables::of(const layer_rotation & how) {
    if (!how.rotates()) {
        return nullptr;
    }
    auto found =
        std::find_if(tables_.begin(), tables_.end(), [&](const auto & table) { return have_same_angles(table.first, how); });
    if (found == tables_.end()) {
        found = tables_.insert(found, {how, make_table(how, rotations_, type_)});
    }
    return found->second.data();
}

} // namespace kvg
