#include "runtime/batch.h"

#include <limits>
#include <set>

#include "error.h"
#include "runtime/bounded.h"

namespace kvg {

batch::batch(const kvg_batch & in, const hparams & h, uint32_t n_batch, const kv_cache & cache)
    : in_(in), all_outputs_(!h.is_last()) {
    if (in.n_tokens < 1 || in.n_tokens > n_batch) {
        fail(KVG_INVALID_ARGUMENT, "a batch of %lld tokens; this context takes 1 to %u (n_batch): %s",
             static_cast<long long>(in.n_tokens), n_batch,
             h.encodes ? "an encoder sees all of a text at once, so shorten it, or use a larger n_batch" : "split it");
    }
    if ((h.is_first() && !in.token) || !in.pos || !in.seq_begin || !in.seq_id || !in.logits) {
        fail(KVG_INVALID_ARGUMENT, "a batch with a NULL array");
    }
    check_front(h);
    sets_.resize(static_cast<size_t>(in.n_tokens), cache.groups().front().cells().make_set());
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        if (h.is_first() && (in.token[i] < 0 || static_cast<uint32_t>(in.token[i]) >= h.n_vocab)) {
            fail(KVG_INVALID_ARGUMENT, "token %u of the batch has id %d; this model has ids 0 to %u", i, in.token[i],
                 h.n_vocab - 1);
        }
        if (in.pos[i] < 0) {
            fail(KVG_INVALID_ARGUMENT, "token %u of the batch has position %d; positions start at 0", i, in.pos[i]);
        }
        if (h.learned_positions && static_cast<uint32_t>(in.pos[i]) >= h.n_ctx_train) {
            fail(KVG_INVALID_ARGUMENT, "token %u of the batch has position %d; this model has learned positions 0 to %u only",
                 i, in.pos[i], h.n_ctx_train - 1);
        }
        n_outputs_ += is_output(i);
        if (is_checkpoint(i) && in.pos[i] == std::numeric_limits<int32_t>::max()) {
            fail(KVG_INVALID_ARGUMENT, "token %u of the batch asks for a checkpoint behind the last position, %d", i,
                 in.pos[i]);
        }
        if (h.encodes && is_checkpoint(i)) {
            fail(KVG_UNSUPPORTED,
                 "token %u of the batch asks for a checkpoint; architecture '%s' is an encoder and keeps nothing", i,
                 h.arch.c_str());
        }
    }
    if (in.repair && h.encodes) {
        fail(KVG_UNSUPPORTED, "architecture '%s' is an encoder and keeps nothing: there is nothing to repair", h.arch.c_str());
    }
    bounded("n_observed", in.n_observed, 0, in.n_tokens);
    read_sets(cache.n_seq_max());
    check_positions(cache, h.encodes);
    if (is_below_) {
        read_places(cache);
    }
    check_shared(cache, h.encodes);
}

void batch::check_front(const hparams & h) const {
    if (h.is_first() && in_.hidden) {
        fail(KVG_INVALID_ARGUMENT, "a batch with hidden states, and the model begins with layer 0 here: it takes tokens");
    }
    if (!h.is_first() && !in_.hidden) {
        fail(
            KVG_INVALID_ARGUMENT,
            "a batch without hidden states, and layers %u to %u take those that layer %u gives: decode the tokens in the stage "
            "before, and hand on what it returns",
            h.here.begin, h.here.end - 1, h.here.begin - 1);
    }
}

std::vector<first_position> batch::first_positions() const {
    std::vector<first_position> first;
    seq_set seen(sets_.front().size());
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        each_member(sets_[i].data(), sets_[i].size(), [&](uint32_t seq) {
            if (!((seen[seq / 64] >> (seq % 64)) & 1)) {
                first.push_back({seq, in_.pos[i]});
                seen[seq / 64] |= uint64_t{1} << (seq % 64);
            }
        });
    }
    return first;
}

void batch::read_sets(uint32_t n_seq_max) {
    if (in_.seq_begin[0] != 0) {
        fail(KVG_INVALID_ARGUMENT, "seq_begin starts with %d, expected 0", in_.seq_begin[0]);
    }
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        const int32_t begin = in_.seq_begin[i];
        const int32_t end = in_.seq_begin[i + 1];
        if (end <= begin) {
            fail(KVG_INVALID_ARGUMENT, "token %u of the batch belongs to no sequence; give it at least one", i);
        }
        for (int32_t j = begin; j < end; ++j) {
            const int32_t seq = in_.seq_id[j];
            if (seq < 0 || static_cast<uint32_t>(seq) >= n_seq_max) {
                fail(KVG_INVALID_ARGUMENT, "token %u of the batch has sequence %d; this context has 0 to %u (n_seq_max = %u)",
                     i, seq, n_seq_max - 1, n_seq_max);
            }
            sets_[i][static_cast<size_t>(seq) / 64] |= uint64_t{1} << (seq % 64);
        }
    }
}

void batch::check_positions(const kv_cache & cache, bool encodes) {
    std::vector<int64_t> last(cache.n_seq_max(), -2); // -2: not looked up yet
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        each_member(sets_[i].data(), sets_[i].size(), [&](uint32_t seq) {
            const bool first = last[seq] == -2;
            if (first) {
                last[seq] = in_.repair ? -1 : cache.seq_pos_max(seq);
            }
            if (first && encodes && in_.pos[i] > 0) {
                fail(KVG_INVALID_ARGUMENT,
                     "token %u of the batch begins a text at position %d; an encoder's text is one batch, from position 0 on",
                     i, in_.pos[i]);
            }
            if (in_.pos[i] <= last[seq]) {
                fail(KVG_INVALID_ARGUMENT,
                     "token %u of the batch has position %d in sequence %u, whose last position is %lld%s: positions must rise "
                     "within a sequence; go on at seq_pos_max + 1, or seq_rm what is to be replaced",
                     i, in_.pos[i], seq, static_cast<long long>(last[seq]), first ? " (in the cache)" : "");
            }
            if (first) {
                check_first(cache, seq, i);
            }
            last[seq] = in_.pos[i];
        });
    }
}

// The first token of a sequence reaches back furthest.
void batch::check_first(const kv_cache & cache, uint32_t seq, uint32_t i) {
    if (in_.repair && in_.pos[i] < cache.next_pos(seq)) {
        cache.require_repair(seq, in_.pos[i]);
        is_below_ = true;
    } else {
        cache.require_seen(seq, in_.pos[i]);
    }
}

void batch::read_places(const kv_cache & cache) {
    for (uint32_t seq = 0; seq < cache.n_seq_max(); ++seq) {
        ends_.push_back(cache.next_pos(seq));
    }
    places_.resize(cache.n_seq_max());
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        each_member(sets_[i].data(), sets_[i].size(), [&](uint32_t seq) { places_[seq].push_back(in_.pos[i]); });
    }
    const cells & cells = cache.groups().front().cells(); // several cells have one position in all groups, or in none
    std::set<std::pair<uint32_t, int32_t>> taken;
    for (uint32_t c = 0; c < cells.n_kv(); ++c) {
        each_member(cells.words(c), cells.n_words(), [&](uint32_t seq) {
            if (has_place(seq, cells.pos(c)) && !taken.emplace(seq, cells.pos(c)).second) {
                fail(KVG_INVALID_ARGUMENT,
                     "sequence %u has several cells at position %d, and a repair can't tell which one it replaces: remove them "
                     "(kv.seq_rm), or repair other positions",
                     seq, cells.pos(c));
            }
        });
    }
}

static bool have_same_state(const states & states, const seq_set & set) {
    std::set<uint32_t> rows;
    each_member(set.data(), set.size(), [&](uint32_t seq) { rows.insert(states.row_of(seq)); });
    return rows.size() == 1;
}

// Whether the sequences of a token see the same cells before it. What the batch replaces for one of them it replaces for all.
bool batch::see_same(const cells & cells, uint32_t i) const {
    uint32_t member = 0;
    each_member(sets_[i].data(), sets_[i].size(), [&](uint32_t seq) { member = seq; });
    for (uint32_t c = 0; c < cells.n_kv(); ++c) {
        const int32_t pos = cells.pos(c);
        const bool is_seen = cells.meets(c, sets_[i]) && pos >= cells.first_seen(in_.pos[i]) && pos < in_.pos[i];
        if (is_seen && !(repairs() && has_place(member, pos)) && !cells.covers(c, sets_[i])) {
            return false;
        }
    }
    return true;
}

// Several sequences may share a token only if they see the same cells before it: it gets one K and one V.
void batch::check_shared(const kv_cache & cache, bool encodes) const {
    const cells & cells = cache.groups().front().cells(); // which sequences see what is alike in all groups
    std::set<seq_set> checked;
    for (uint32_t i = 0; i < n_tokens(); ++i) {
        if (in_.seq_begin[i + 1] - in_.seq_begin[i] < 2) {
            continue;
        }
        if (encodes) {
            fail(KVG_UNSUPPORTED, "token %u of the batch belongs to several sequences; in an encoder each text has its own", i);
        }
        bool same = have_same_state(cache.states(), sets_[i]);
        if (same && (checked.insert(sets_[i]).second || repairs())) { // unless they repair, later ones see the same
            same = see_same(cells, i);
        }
        for (uint32_t j = 0; j < i && same; ++j) {
            seq_set both = sets_[j];
            for (size_t w = 0; w < both.size(); ++w) {
                both[w] &= sets_[i][w];
            }
            same = !meets(sets_[j], sets_[i]) || both == sets_[i];
        }
        if (!same) {
            fail(KVG_INVALID_ARGUMENT,
                 "token %u of the batch belongs to several sequences that see different cells before it; "
                 "give each sequence a token of its own, or share the whole prefix first (seq_cp)",
                 i);
        }
    }
}

} // namespace kvg
