// The special tokens of a vocabulary, and where a text spells them.
//
// libllama looks for one special token after the other, the longest first, and cuts each out of what text is left. Its time
// grows with the square of what it finds. Here the same is found in time that grows with the text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvg {

struct special_token {
    int32_t id;
    std::string text;
    bool strips_left; // white space before it is dropped
    bool strips_right;
};

// A token that a text spells. begin to end: its bytes, with the white space that it drops.
struct special_match {
    uint64_t begin;
    uint64_t end;
    int32_t token;
};

class special_tokens {
public:
    // In the order in which they are looked for: none is longer than the one before it, and none is empty.
    explicit special_tokens(std::vector<special_token> tokens);

    // In the order of the text; none overlaps another. Ends early, with no use of what it returns, once another thread sets `stop`.
    std::vector<special_match> find(std::string_view text, const volatile int32_t & stop) const;

private:
    // A state of Aho and Corasick's machine (1975) for the tokens from their last byte to their first: it reads a text backwards, and so
    // knows at each byte the longest token that begins there.
    struct state {
        uint32_t child = 0; // the first; 0: none
        uint32_t next = 0;  // its parent's next child
        uint32_t shorter = 0;
        int32_t rank = -1; // of the token that is this state; -1: none
        uint8_t byte = 0;
    };

    uint32_t child_of(uint32_t parent, uint8_t byte) const;
    uint32_t step(uint32_t from, uint8_t byte) const;
    uint32_t add(uint32_t parent, uint8_t byte);
    void link();

    std::vector<special_token> tokens_;
    std::vector<state> states_;     // the first has read nothing
    uint32_t first_[256] = {};      // its children
    std::vector<uint32_t> longest_; // of each state: itself or the longest of the shorter ones that is a token; 0: none
    std::vector<uint32_t> ends_;    // of each token: its state
};

} // namespace kvg
