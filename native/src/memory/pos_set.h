// A set of positions, kept as runs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvg {

// Positions of a text without gaps are one run. A set that would need more than MAX_RUNS also gets the positions between its two lowest
// runs: it then has more positions than were added, never fewer.
class pos_set {
public:
    static constexpr size_t MAX_RUNS = 256;

    // -1: the set is empty
    int32_t max() const { return runs_.empty() ? -1 : runs_.back().last; }
    // the first position from pos on that is not in the set
    int64_t first_gap(int64_t pos) const {
        for (const run & r : runs_) {
            if (pos >= r.first && pos <= r.last) {
                return int64_t{r.last} + 1;
            }
        }
        return pos;
    }
    // whether it has any position from p0 to before p1
    bool meets(int64_t p0, int64_t p1) const {
        return std::any_of(runs_.begin(), runs_.end(), [&](const run & r) { return r.first < p1 && r.last >= p0; });
    }
    // precondition: 0 <= first <= last
    void add(int32_t first, int32_t last) {
        const bool in_order = runs_.empty() || first > runs_.back().first;
        runs_.push_back({first, last});
        if (!in_order) {
            std::sort(runs_.begin(), runs_.end(), [](const run & a, const run & b) { return a.first < b.first; });
        }
        join();
    }
    // Adds the positions of another set from p0 to before p1.
    void add(const pos_set & other, int64_t p0, int64_t p1) {
        for (const run & r : other.runs_) {
            const int64_t first = std::max<int64_t>(r.first, p0);
            const int64_t last = std::min<int64_t>(r.last, p1 - 1);
            if (first <= last) {
                add(static_cast<int32_t>(first), static_cast<int32_t>(last));
            }
        }
    }
    // Removes positions from p0 to before p1.
    void remove(int64_t p0, int64_t p1) {
        pos_set left;
        left.add(*this, 0, p0);
        left.add(*this, p1, std::numeric_limits<int64_t>::max());
        *this = left;
    }
    // The positions after a change of those in a part (reposition). What would be below 0 is left out.
    template <class R> pos_set after(const R & change) const {
        pos_set part;
        pos_set result = *this;
        part.add(*this, change.p0, change.p1);
        result.remove(change.p0, change.p1);
        for (const run & r : part.runs_) {
            const int64_t first = std::max<int64_t>(change.after(r.first), 0);
            const int64_t last = std::min<int64_t>(change.after(r.last), std::numeric_limits<int32_t>::max());
            if (first <= last) {
                result.add(static_cast<int32_t>(first), static_cast<int32_t>(last));
            }
        }
        return result;
    }

private:
    struct run {
        int32_t first;
        int32_t last;
    };

    // precondition: the runs are in order of their first position
    void join() {
        size_t n = 0; // runs that are done
        for (size_t i = 0; i < runs_.size(); ++i) {
            if (n > 0 && runs_[i].first <= int64_t{runs_[n - 1].last} + 1) {
                runs_[n - 1].last = std::max(runs_[n - 1].last, runs_[i].last);
            } else {
                runs_[n++] = runs_[i];
            }
        }
        runs_.resize(n);
        if (n > MAX_RUNS) {
            runs_[1].first = runs_[0].first;
            runs_.erase(runs_.begin());
        }
    }

    std::vector<run> runs_; // in rising order, none touching the next
};

} // namespace kvg
