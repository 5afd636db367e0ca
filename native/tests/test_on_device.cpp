#include <doctest/doctest.h>

#include <map>

#include "rotated.h"
#include "shift/on_device.h"

using namespace kvg;

namespace {

// What of a dither lies where: (begin, n) of what is rotated in place, and rows.
struct lot {
    uint8_t dither;
    numbers spans; // begin, n, begin, n
    numbers rows;
};

void check(const cells & c, uint32_t align, size_t max_spans, const std::vector<lot> & expected, bool by_dither = true) {
    const rotation_list list = settle(c, false).rotated;
    std::map<uint8_t, lot> found;
    for (const rotated_piece & piece : cut_pieces(list, {by_dither, align, max_spans, 3})) {
        const uint8_t dither = by_dither ? list.rotations[piece.rows.front().index].from : 0;
        lot & these = found.try_emplace(dither, lot{dither, {}, {}}).first->second;
        const auto n = static_cast<uint32_t>(piece.rows.size());
        CHECK((piece.in_place || n <= 3));
        if (piece.in_place) {
            these.spans.insert(these.spans.end(), {piece.rows.front().row, n});
        }
        for (uint32_t i = 0; i < n; ++i) {
            CHECK((!by_dither || list.rotations[piece.rows[i].index].from == dither));
            if (piece.in_place) {
                CHECK(piece.rows[i].row == piece.rows.front().row + i);
            } else {
                these.rows.push_back(piece.rows[i].row);
            }
        }
    }
    REQUIRE(found.size() == expected.size());
    for (const lot & e : expected) {
        REQUIRE(found.count(e.dither) == 1);
        CHECK(found.at(e.dither).spans == e.spans);
        CHECK(found.at(e.dither).rows == e.rows);
    }
}

// 64 cells, of which those at the given positions are shifted.
cells shifted(const numbers & positions) {
    cells c = full();
    for (const uint32_t p : positions) {
        c.apply(c.check_add(0, p, p + 1, 1000));
    }
    return c;
}

} // namespace

TEST_CASE("runs of cells that are rotated, and nothing else") {
    check(shifted({}), 1, 8, {});
    check(shifted({3, 4, 5, 20, 63}), 1, 8, {{0, {3, 3, 20, 1, 63, 1}, {}}});
}

TEST_CASE("spans begin at multiples of the alignment, what comes before goes by rows") {
    check(shifted({14, 15, 16, 17, 40}), 16, 8, {{0, {16, 2}, {14, 15, 40}}});
    check(shifted({32, 33, 50}), 16, 8, {{0, {32, 2}, {50}}});
}

TEST_CASE("the longest runs are spans, what is above the most of them goes by rows") {
    check(shifted({2, 4, 6, 7}), 1, 2, {{0, {6, 2, 2, 1}, {4}}});
    check(shifted({2, 4, 6, 7}), 1, 0, {{0, {}, {6, 7, 2, 4}}});
    check(shifted({14, 15, 16, 32}), 16, 1, {{0, {16, 1}, {14, 15, 32}}});
}

TEST_CASE("cells go with those of the same dither, neighbours or not, unless it doesn't matter") {
    cells c = shifted({0, 1, 2, 3});
    rotate(c, settle(c, false).rotated);
    c.apply(c.check_add(0, 1000, 1002, 1000));
    rotate(c, settle(c, false).rotated); // cells 0 and 1 twice, 2 and 3 once
    c.apply(c.check_add(0, 0, -1, 1000));
    check(c, 1, 8, {{0, {4, 60}, {}}, {1, {2, 2}, {}}, {2, {0, 2}, {}}});
    check(c, 1, 2, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 4, 8, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 1, 8, {{0, {0, 64}, {}}}, false);
}
