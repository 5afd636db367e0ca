#include "text/special_tokens.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace kvg {

namespace {

// isspace() of the C locale
bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

// What is left of a text.
class uncut {
public:
    explicit uncut(std::string_view text) : text_(text), cut_(text.size()) {}

    bool has(uint64_t at) const { return !cut_[at]; }

    special_match cut(const special_token & token, uint64_t begin) {
        uint64_t end = begin + token.text.size();
        while (token.strips_left && begin > 0 && has(begin - 1) && is_space(text_[begin - 1])) {
            --begin;
        }
        while (token.strips_right && end < text_.size() && has(end) && is_space(text_[end])) {
            ++end;
        }
        std::fill(cut_.begin() + static_cast<int64_t>(begin), cut_.begin() + static_cast<int64_t>(end), true);
        return {begin, end, token.id};
    }

private:
    std::string_view text_;
    std::vector<char> cut_;
};

} // namespace

special_tokens::special_tokens(std::vector<special_token> tokens) : tokens_(std::move(tokens)), states_(1) {
    for (size_t rank = 0; rank < tokens_.size(); ++rank) {
        const std::string & text = tokens_[rank].text;
        uint32_t at = 0;
        for (auto byte = text.rbegin(); byte != text.rend(); ++byte) {
            at = add(at, static_cast<uint8_t>(*byte));
        }
        ends_.push_back(at);
        if (states_[at].rank < 0) { // of two with the same text, the second is never found
            states_[at].rank = static_cast<int32_t>(rank);
        }
    }
    link();
}

uint32_t special_tokens::child_of(uint32_t parent, uint8_t byte) const {
    if (parent == 0) {
        return first_[byte];
    }
    uint32_t child = states_[parent].child;
    while (child != 0 && states_[child].byte != byte) {
        child = states_[child].next;
    }
    return child;
}

uint32_t special_tokens::add(uint32_t parent, uint8_t byte) {
    uint32_t child = child_of(parent, byte);
    if (child == 0) {
        child = static_cast<uint32_t>(states_.size());
        states_.push_back({0, states_[parent].child, 0, -1, byte});
        states_[parent].child = child;
        if (parent == 0) {
            first_[byte] = child;
        }
    }
    return child;
}

uint32_t special_tokens::step(uint32_t from, uint8_t byte) const {
    for (;; from = states_[from].shorter) {
        const uint32_t child = child_of(from, byte);
        if (child != 0 || from == 0) {
            return child;
        }
    }
}

void special_tokens::link() {
    longest_.assign(states_.size(), 0);
    std::vector<uint32_t> order{0};
    for (size_t i = 0; i < order.size(); ++i) {
        const uint32_t parent = order[i];
        for (uint32_t child = states_[parent].child; child != 0; child = states_[child].next) {
            order.push_back(child);
            const uint32_t shorter = parent == 0 ? 0 : step(states_[parent].shorter, states_[child].byte);
            states_[child].shorter = shorter;
            longest_[child] = states_[child].rank >= 0 ? child : longest_[shorter];
        }
    }
}

std::vector<special_match> special_tokens::find(std::string_view text, const volatile int32_t & stop) const {
    // what is to be tried next: libllama's order is by token, and then by place
    using attempt = std::pair<int32_t, uint64_t>; // rank, begin
    std::vector<attempt> attempts;
    uint32_t at = 0;
    for (uint64_t begin = text.size(); begin-- > 0 && !stop;) {
        at = step(at, static_cast<uint8_t>(text[begin]));
        if (longest_[at] != 0) {
            attempts.push_back({states_[longest_[at]].rank, begin});
        }
    }
    std::priority_queue<attempt, std::vector<attempt>, std::greater<>> next(std::greater<>{}, std::move(attempts));
    uncut rest(text);
    std::vector<special_match> found;
    while (!next.empty() && !stop) {
        const auto [rank, begin] = next.top();
        next.pop();
        if (!rest.has(begin)) {
            continue;
        }
        // what was cut out before is no shorter: it can't lie between the first byte and the last
        if (rest.has(begin + tokens_[static_cast<size_t>(rank)].text.size() - 1)) {
            found.push_back(rest.cut(tokens_[static_cast<size_t>(rank)], begin));
            continue;
        }
        const uint32_t shorter = longest_[states_[ends_[static_cast<size_t>(rank)]].shorter];
        if (shorter != 0) {
            next.push({states_[shorter].rank, begin});
        }
    }
    std::sort(found.begin(), found.end(), [](const special_match & a, const special_match & b) { return a.begin < b.begin; });
    return found;
}

} // namespace kvg
