#include "text/encode.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "error.h"

namespace kvg {

namespace {

// of libllama's llama_token_attr
constexpr int32_t UNKNOWN = 1 << 0;
constexpr int32_t CONTROL = 1 << 3;
constexpr int32_t USER_DEFINED = 1 << 4;
constexpr int32_t LSTRIP = 1 << 7;
constexpr int32_t RSTRIP = 1 << 8;

// Where ids go; behind the last room they are only counted.
class id_writer {
public:
    id_writer(int32_t * ids, uint64_t room) : ids_(ids), room_(room) {}

    uint64_t count() const { return count_; }

    void add(int32_t id) {
        if (count_ < room_) {
            ids_[count_] = id;
        }
        ++count_;
    }

    void add(const void * vocab, kvg_tokenize_text tokenize, std::string_view text) {
        if (text.empty()) {
            return;
        }
        const uint64_t left = count_ < room_ ? room_ - count_ : 0;
        const auto most = static_cast<int32_t>(std::min<uint64_t>(left, std::numeric_limits<int32_t>::max()));
        const int32_t n =
            tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), ids_ + (room_ - left), most, false, false);
        if (n == std::numeric_limits<int32_t>::min() || n > most) {
            fail(KVG_INTERNAL, "libllama answered %d to a text of %zu bytes", n, text.size());
        }
        if (n < 0) { // no room: what would have been written
            room_ = std::min(room_, count_);
        }
        count_ += static_cast<uint64_t>(n < 0 ? -n : n);
    }

private:
    int32_t * ids_;
    uint64_t room_;
    uint64_t count_ = 0;
};

} // namespace

special_vocab read_specials(const void * vocab, int32_t n_tokens, kvg_token_attr attr, kvg_token_text text) {
    std::vector<int32_t> order;
    uint64_t longest = 0;
    const auto text_of = [&](int32_t id) {
        const char * found = text(vocab, id);
        if (!found || !*found) {
            fail(KVG_INVALID_ARGUMENT, "token %d has no text", id);
        }
        return std::string_view(found);
    };
    std::vector<uint64_t> sizes(static_cast<size_t>(n_tokens));
    for (int32_t id = 0; id < n_tokens; ++id) {
        sizes[static_cast<size_t>(id)] = text_of(id).size();
        longest = std::max(longest, sizes[static_cast<size_t>(id)]);
        if (attr(vocab, id) & (CONTROL | USER_DEFINED | UNKNOWN)) {
            order.push_back(id);
        }
    }
    // Not a stable sort: which of two tokens of one length comes first is decided by how this algorithm goes about it, and
    // libllama sorts the same ids in the same way.
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return sizes[static_cast<size_t>(a)] > sizes[static_cast<size_t>(b)]; });
    std::vector<special_token> all, users;
    bool strips = false;
    for (const int32_t id : order) {
        const int32_t flags = attr(vocab, id);
        const special_token token{id, std::string(text_of(id)), (flags & LSTRIP) != 0, (flags & RSTRIP) != 0};
        strips = strips || token.strips_left || token.strips_right;
        all.push_back(token);
        if (!(flags & (CONTROL | UNKNOWN))) {
            users.push_back(token);
        }
    }
    return {special_tokens(std::move(all)), special_tokens(std::move(users)), longest, strips};
}

uint64_t encode(const special_tokens & specials, const void * vocab, kvg_tokenize_text tokenize, std::string_view text,
                const volatile int32_t & stop, int32_t * ids, uint64_t room) {
    id_writer out(ids, room);
    uint64_t begin = 0;
    for (const special_match & match : specials.find(text, stop)) {
        if (stop) {
            return out.count();
        }
        out.add(vocab, tokenize, text.substr(begin, match.begin - begin));
        out.add(match.token);
        begin = match.end;
    }
    if (!stop) {
        out.add(vocab, tokenize, text.substr(begin));
    }
    return out.count();
}

} // namespace kvg
