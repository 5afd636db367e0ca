#include "model/layer_spec.h"

#include <algorithm>

#include "fault.h"

namespace kvg {

std::vector<group_spec> make_groups(std::vector<layer_spec> & layers) {
    std::vector<group_spec> groups;
    for (uint32_t il = 0; fault_value("window") > 0 && il < layers.size(); il += 2) {
        layers[il].window = static_cast<uint32_t>(fault_value("window"));
    }
    for (uint32_t il = 0; fault_value("chunk") > 0 && il < layers.size(); ++il) {
        layers[il].window = layers[il].chunked ? static_cast<uint32_t>(fault_value("chunk")) : layers[il].window;
    }
    for (uint32_t il = 0; il < layers.size(); ++il) {
        const layer_spec & layer = layers[il];
        if (layer.kv_from != il || !layer.attends()) {
            continue;
        }
        auto found = std::find_if(groups.begin(), groups.end(), [&](const group_spec & g) {
            return g.window == layer.window && g.chunked == layer.chunked && g.both_ways == layer.both_ways &&
                   g.n_head_kv == layer.n_head_kv && g.head_dim_k == layer.head_dim_k && g.head_dim_v == layer.stored_v() &&
                   g.v_in_k == layer.v_in_k();
        });
        if (found == groups.end()) {
            groups.push_back({layer.window,
                              layer.n_head_kv,
                              layer.head_dim_k,
                              layer.stored_v(),
                              layer.v_in_k(),
                              layer.chunked,
                              layer.both_ways,
                              {}});
            found = groups.end() - 1;
        }
        found->layers.push_back(il);
    }
    if (groups.empty()) {
        groups.push_back({0, 0, 0, 0, 0, false, false, {}});
    }
    std::stable_partition(groups.begin(), groups.end(), [](const group_spec & g) { return g.window == 0; });
    for (uint32_t i = 0; i < groups.size(); ++i) {
        for (const uint32_t il : groups[i].layers) {
            layers[il].group = i;
        }
    }
    for (layer_spec & layer : layers) {
        layer.group = layer.attends() ? layers[layer.kv_from].group : NO_GROUP;
    }
    return groups;
}

} // namespace kvg
