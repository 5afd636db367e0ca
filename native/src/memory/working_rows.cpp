#include "memory/working_rows.h"

#include <algorithm>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "host_memory.h"

namespace kvg {

namespace {

constexpr uint32_t NOBODY = UINT32_MAX;

// What a buffer type takes for a tensor, so that the next one is aligned.
size_t padded_size(ggml_backend_buffer_type_t type, const ggml_tensor * rows) {
    const size_t align = ggml_backend_buft_get_alignment(type);
    return (ggml_backend_buft_get_alloc_size(type, rows) + align - 1) / align * align;
}

} // namespace

working_rows::working_rows(const hparams & h, const kv_homes & homes, const std::deque<kv_group> & groups, uint32_t n_places) {
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const uint32_t owner = h.layers[il].kv_from;
        ggml_backend_dev_t reader = homes.readers[owner];
        const bool has_turn = h.layers[il].attends() && reader != homes.cells[owner];
        turns_.push_back({has_turn ? reader : nullptr, owner == il, 0, nullptr, nullptr});
        if (has_turn) {
            rooms_[reader].readers.push_back(il);
        }
    }
    for (auto & [device, room] : rooms_) {
        const auto n_owners = static_cast<size_t>(
            std::count_if(room.readers.begin(), room.readers.end(), [&](uint32_t il) { return turns_[il].is_owner; }));
        size_t n = std::min<size_t>(n_places, n_owners);
        while (!plan(h.layers, room.readers, n)) {
            ++n;
        }
        room.buffers.resize(n);
        for (ggml_backend_buffer_ptr & buffer : room.buffers) {
            buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), 0));
            if (!buffer) {
                fail(KVG_DEVICE, "out of host memory for the working rows' tensors");
            }
        }
        create(groups, h.layers, room);
    }
}

// Who gets which place. The layer whose rows are read again latest makes way (Belady), but not the one that was used just before: its turn
// may not be over when the next rows come. False when a layer would find that rows which it reads have made way.
bool working_rows::plan(const std::vector<layer_spec> & layers, const std::vector<uint32_t> & readers, size_t n_places) {
    std::vector<uint32_t> owners(n_places, NOBODY); // of what is in each place
    size_t last = n_places;
    for (auto reader = readers.begin(); reader != readers.end(); ++reader) {
        const uint32_t owner = layers[*reader].kv_from;
        auto place = static_cast<size_t>(std::find(owners.begin(), owners.end(), owner) - owners.begin());
        if (place == n_places && !turns_[*reader].is_owner) {
            return false;
        }
        if (place == n_places) {
            const auto unread = [&](size_t p) { // turns until its rows are read again
                return std::find_if(reader, readers.end(), [&](uint32_t il) { return layers[il].kv_from == owners[p]; }) -
                       reader;
            };
            place = last == 0 && n_places > 1 ? 1 : 0;
            for (size_t p = place + 1; p < n_places; ++p) {
                place = p != last && unread(p) > unread(place) ? p : place;
            }
        }
        owners[place] = owner;
        turns_[*reader].place = static_cast<uint32_t>(place);
        last = place;
    }
    return true;
}

void working_rows::create(const std::deque<kv_group> & groups, const std::vector<layer_spec> & layers, room & room) {
    room.ctx = new_ggml_context(2 * room.readers.size() * ggml_tensor_overhead());
    for (const uint32_t il : room.readers) {
        row_turn & turn = turns_[il];
        if (!turn.is_owner) {
            continue;
        }
        const kv_group & group = groups[layers[il].group];
        turn.k = ggml_dup_tensor(room.ctx.get(), group.k(il));
        ggml_format_name(turn.k, "working_k_%u", il);
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(turn.device);
        size_t bytes = padded_size(type, turn.k);
        turn.k->buffer = room.buffers.front().get(); // says where it will be, and has no address
        if (group.v(il)) {
            turn.v = ggml_dup_tensor(room.ctx.get(), group.v(il));
            ggml_format_name(turn.v, "working_v_%u", il);
            bytes += padded_size(type, turn.v);
            turn.v->buffer = room.buffers.front().get();
        }
        room.place_bytes = std::max(room.place_bytes, bytes);
    }
}

void working_rows::allocate(ggml_backend_dev_t device, room & room) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    for (ggml_backend_buffer_ptr & buffer : room.buffers) {
        buffer.reset(fault_hit("working-alloc") ? nullptr : ggml_backend_buft_alloc_buffer(type, room.place_bytes));
        if (!buffer) {
            fail(KVG_DEVICE, "%s refused %s for the rows of a layer, with %s free; use a smaller n_ctx or device_layers",
                 ggml_backend_dev_name(device), format_bytes(room.place_bytes).c_str(),
                 format_bytes(device_memory(device).free).c_str());
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
    }
    for (const uint32_t il : room.readers) {
        const row_turn & turn = turns_[il];
        if (!turn.is_owner) {
            continue;
        }
        ggml_backend_buffer_t buffer = room.buffers[turn.place].get();
        auto * begin = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer));
        const auto place = [&](ggml_tensor * rows, uint8_t * address) {
            rows->buffer = nullptr;
            return ggml_backend_tensor_alloc(buffer, rows, address) == GGML_STATUS_SUCCESS;
        };
        if (!place(turn.k, begin) || (turn.v && !place(turn.v, begin + padded_size(type, turn.k)))) {
            fail(KVG_DEVICE, "%s: can't place the rows of layer %u", ggml_backend_dev_name(device), il);
        }
    }
}

void working_rows::allocate() {
    for (auto & [device, room] : rooms_) {
        allocate(device, room);
    }
}

uint64_t working_rows::bytes_on(ggml_backend_dev_t device) const {
    const auto found = rooms_.find(device);
    return found == rooms_.end() ? 0 : found->second.buffers.size() * found->second.place_bytes;
}

std::vector<ggml_backend_dev_t> working_rows::devices() const {
    std::vector<ggml_backend_dev_t> found;
    for (const auto & [device, room] : rooms_) {
        found.push_back(device);
    }
    return found;
}

} // namespace kvg
