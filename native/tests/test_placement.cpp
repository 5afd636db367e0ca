#include <doctest/doctest.h>

#include <vector>

#include "model/placement.h"

using namespace kvg;

using homes = std::vector<size_t>;

TEST_CASE("the last layers go to devices, the output being one more") {
    CHECK(share_layers(3, 0, {1.0}) == homes{1, 1, 1, 1});
    CHECK(share_layers(3, 1, {1.0}) == homes{1, 1, 1, 0});
    CHECK(share_layers(3, 3, {1.0}) == homes{1, 0, 0, 0});
    CHECK(share_layers(3, 4, {1.0}) == homes{0, 0, 0, 0});
    CHECK(share_layers(3, 99, {1.0}) == homes{0, 0, 0, 0});
    CHECK(share_layers(3, -1, {1.0}) == homes{0, 0, 0, 0});
    CHECK(share_layers(3, -1, {}) == homes{0, 0, 0, 0}); // which is the CPU
}

// Of five, the first has 0, 1/5, 2/5 and 3/5 of what went before it below 3/4, as llama.cpp counts them.
TEST_CASE("devices have their shares of what is shared out") {
    CHECK(share_layers(4, -1, {3.0, 1.0}) == homes{0, 0, 0, 0, 1});
    CHECK(share_layers(4, -1, {1.0, 3.0}) == homes{0, 0, 1, 1, 1});
    CHECK(share_layers(4, 4, {1.0, 1.0}) == homes{2, 0, 0, 1, 1});
    CHECK(share_layers(5, -1, {1.0, 1.0, 1.0}) == homes{0, 0, 1, 1, 2, 2});
    CHECK(share_layers(3, -1, {0.0, 1.0}) == homes{1, 1, 1, 1});
    CHECK(share_layers(3, -1, {1.0, 0.0}) == homes{0, 0, 0, 0});
    CHECK(share_layers(3, 2, {1.0, 0.0, 1.0}) == homes{3, 3, 0, 2});
    CHECK(share_layers(0, -1, {2.0, 2.0}) == homes{0});
}
