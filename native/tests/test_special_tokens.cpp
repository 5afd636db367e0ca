#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <random>
#include <string>

#include "error.h"
#include "text/encode.h"
#include "text/special_tokens.h"

using namespace kvg;

namespace {

const int32_t go_on = 0;

// A text that is cut up as libllama does it: for one token after the other, wherever text is left.
struct piece {
    size_t begin, end;
    int32_t token; // -1: text
};

bool is_space(char c) { return std::string(" \t\n\v\f\r").find(c) != std::string::npos; }

std::list<piece> cut_up(const std::vector<special_token> & tokens, const std::string & text) {
    std::list<piece> pieces{{0, text.size(), -1}};
    for (const special_token & token : tokens) {
        for (auto it = pieces.begin(); it != pieces.end(); ++it) {
            const size_t at = it->token < 0 ? text.substr(0, it->end).find(token.text, it->begin) : std::string::npos;
            if (at == std::string::npos) {
                continue;
            }
            piece left{it->begin, at, -1}, right{at + token.text.size(), it->end, -1};
            while (token.strips_left && left.end > left.begin && is_space(text[left.end - 1])) {
                --left.end;
            }
            while (token.strips_right && right.end > right.begin && is_space(text[right.begin])) {
                ++right.begin;
            }
            pieces.insert(it, left);
            *it = {at, at + token.text.size(), token.id};
            pieces.insert(std::next(it), right);
        }
    }
    pieces.remove_if([](const piece & each) { return each.begin == each.end; });
    return pieces;
}

// ids below 1000 are tokens; text is shown by its places
std::vector<size_t> shown(const std::list<piece> & pieces) {
    std::vector<size_t> all;
    for (const piece & each : pieces) {
        if (each.token >= 0) {
            all.push_back(static_cast<size_t>(each.token));
        } else {
            all.insert(all.end(), {1000 + each.begin, 1000 + each.end});
        }
    }
    return all;
}

std::vector<size_t> found(const special_tokens & tokens, const std::string & text) {
    std::list<piece> pieces;
    size_t begin = 0;
    for (const special_match & match : tokens.find(text, go_on)) {
        REQUIRE(match.begin >= begin);
        REQUIRE(match.end > match.begin);
        pieces.push_back({begin, match.begin, -1});
        pieces.push_back({0, 1, match.token});
        begin = match.end;
    }
    pieces.push_back({begin, text.size(), -1});
    pieces.remove_if([](const piece & each) { return each.begin == each.end; });
    return shown(pieces);
}

std::string random_text(std::mt19937 & rng, const std::string & letters, size_t most) {
    std::string text;
    for (size_t n = 1 + rng() % most; n > 0; --n) {
        text += letters[rng() % letters.size()];
    }
    return text;
}

// A vocabulary of libllama's in which a text's ids are its bytes, each with 1000 added.
struct vocabulary {
    std::vector<std::string> texts;
    std::vector<int32_t> attrs;
    mutable int32_t calls = 0;
    mutable int32_t stop = 0;
    int32_t stop_after = INT32_MAX;
};

const vocabulary & of(const void * pointer) { return *static_cast<const vocabulary *>(pointer); }
int32_t attr_of(const void * vocab, int32_t id) { return of(vocab).attrs[static_cast<size_t>(id)]; }
const char * text_of(const void * vocab, int32_t id) { return of(vocab).texts[static_cast<size_t>(id)].c_str(); }

int32_t tokenize(const void * vocab, const char * text, int32_t size, int32_t * ids, int32_t room, bool add, bool parse) {
    CHECK_FALSE(add);
    CHECK_FALSE(parse);
    of(vocab).stop = ++of(vocab).calls >= of(vocab).stop_after;
    if (size > room) {
        return -size;
    }
    for (int32_t i = 0; i < size; ++i) {
        ids[i] = 1000 + static_cast<uint8_t>(text[i]);
    }
    return size;
}

constexpr int32_t NORMAL = 4, CONTROL = 8, USER_DEFINED = 16, LEFT = 128, RIGHT = 256;

std::vector<int32_t> encoded(const vocabulary & vocab, bool parse_special, const std::string & text, size_t room) {
    const special_vocab specials = read_specials(&vocab, static_cast<int32_t>(vocab.texts.size()), attr_of, text_of);
    std::vector<int32_t> ids(room, -7);
    const uint64_t n =
        encode(parse_special ? specials.all : specials.users, &vocab, tokenize, text, vocab.stop, ids.data(), room);
    if (n <= room) {
        CHECK(std::all_of(ids.begin() + static_cast<int64_t>(n), ids.end(), [](int32_t id) { return id == -7; }));
    }
    ids.resize(n);
    return ids;
}

} // namespace

TEST_CASE("special tokens are found where cutting out one after the other finds them, overlaps and white space included") {
    std::mt19937 rng(5);
    size_t n_found = 0;
    for (int round = 0; round < 4000; ++round) {
        const std::string letters = round % 2 ? "ab" : "a \n<";
        std::vector<special_token> tokens;
        for (size_t n = rng() % 20; n > 0; --n) {
            const int32_t id = static_cast<int32_t>(tokens.size());
            tokens.push_back({id, random_text(rng, letters, 5), rng() % 4 == 0, rng() % 4 == 0});
        }
        std::sort(tokens.begin(), tokens.end(),
                  [](const special_token & a, const special_token & b) { return a.text.size() > b.text.size(); });
        const special_tokens own(tokens);
        for (int i = 0; i < 5; ++i) {
            const std::string text = random_text(rng, letters, 40);
            REQUIRE(found(own, text) == shown(cut_up(tokens, text)));
            n_found += own.find(text, go_on).size();
        }
    }
    CHECK(n_found > 10000);
    CHECK(special_tokens({}).find("text", go_on).empty());
    CHECK(special_tokens({{1, "a", false, false}}).find("", go_on).empty());
}

TEST_CASE("bytes of 0 and of 255 are bytes as others are") {
    const std::string zero("\0a", 2);
    const special_tokens tokens({{0, zero, false, false}, {1, "\xff", false, false}});
    CHECK(found(tokens, "a\xff" + zero + zero) == std::vector<size_t>{1000, 1001, 1, 0, 0});
}

TEST_CASE("a text full of special tokens, or of their beginnings, takes a time that grows with it") {
    const special_tokens tokens({{0, std::string(300, 'a'), false, false}, {1, "aab", false, false}, {2, "aa", false, false}});
    const auto seconds = [&](const std::string & text) {
        const auto begin = std::chrono::steady_clock::now();
        CHECK(!tokens.find(text, go_on).empty());
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    CHECK(seconds(std::string(1 << 20, 'a')) < 5); // 0.1; what goes back for each begun token needs 300 steps for a byte
    std::string pairs;
    for (int i = 0; i < 1 << 18; ++i) {
        pairs += "aabc";
    }
    CHECK(seconds(pairs) < 5);
}

TEST_CASE("what is between special tokens is libllama's, and control tokens count only when they are asked for") {
    vocabulary vocab{{"x", "<c>", "<u>", "<longest of all>", "[l]", "[r]"},
                     {NORMAL, CONTROL, USER_DEFINED, NORMAL, CONTROL | LEFT, USER_DEFINED | RIGHT}};
    const std::string text = "x<c><u> [l] [r] <c>";
    const std::vector<int32_t> all{1120, 1, 2, 4, 1032, 5, 1};
    CHECK(encoded(vocab, true, text, 40) == all);
    const std::vector<int32_t> users{1120, 1060, 1099, 1062, 2, 1032, 1091, 1108, 1093, 1032, 5, 1060, 1099, 1062};
    CHECK(encoded(vocab, false, text, 40) == users);
    CHECK(encoded(vocab, false, text, users.size()) == users);
    for (size_t room = 0; room < users.size(); ++room) { // told how many there are
        CHECK(encoded(vocab, false, text, room).size() == users.size());
    }
    CHECK(encoded(vocab, true, "", 1).empty());
    const special_vocab specials = read_specials(&vocab, 6, attr_of, text_of);
    CHECK(specials.longest == 16);
    CHECK(specials.strips);
    CHECK_FALSE(read_specials(&vocab, 4, attr_of, text_of).strips);
}

TEST_CASE("a text that nobody waits for any more ends at its next special token") {
    vocabulary vocab{{"<c>"}, {CONTROL}};
    vocab.stop_after = 3;
    std::string text;
    for (int i = 0; i < 100; ++i) {
        text += "a<c>";
    }
    encoded(vocab, true, text, 1000);
    CHECK(vocab.calls == 3);
    vocab.stop = 1; // before anything was found
    const special_vocab specials = read_specials(&vocab, 1, attr_of, text_of);
    CHECK(encode(specials.all, &vocab, tokenize, text, vocab.stop, nullptr, 0) == 0);
    CHECK(vocab.calls == 3);
    CHECK(special_tokens({{0, "<c>", false, false}}).find(text, vocab.stop).empty());
}

TEST_CASE("a token without a text, and an answer that is none, are errors") {
    vocabulary vocab{{""}, {CONTROL}};
    CHECK_THROWS_AS(read_specials(&vocab, 1, attr_of, text_of), error);
    const auto broken = [](const void *, const char *, int32_t, int32_t *, int32_t, bool, bool) { return INT32_MIN; };
    int32_t ids[4];
    CHECK_THROWS_AS(encode(special_tokens({}), &vocab, broken, "abc", go_on, ids, 4), error);
}
