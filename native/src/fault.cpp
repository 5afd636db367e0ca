#include "fault.h"

#include "error.h"

#ifdef KVGRAPH_TEST_HOOKS

#include <array>
#include <cstring>

namespace kvg {

struct fault_site {
    const char * name;
    int64_t countdown;
};

// Thread-local, so that a test in one thread can't trip another one's context.
static thread_local std::array<fault_site, 37> sites = {{
    {"cells", 0},          {"build", 0},         {"alloc", 0},
    {"compute", 0},        {"shift-build", 0},   {"shift-alloc", 0},
    {"shift-compute", 0},  {"defrag-build", 0},  {"defrag-alloc", 0},
    {"defrag-compute", 0}, {"defrag-cells", 0},  {"copy-build", 0},
    {"copy-alloc", 0},     {"copy-compute", 0},  {"load-write", 0},
    {"shift-skip", 0},     {"shift-sign", 0},    {"defrag-source", 0},
    {"lacks-rope", 0},     {"lacks-mul-mat", 0}, {"lacks-large-mul-mat", 0},
    {"alloc-kept", 0},     {"window", 0},        {"chunk", 0},
    {"load-state", 0},     {"state-take", 0},    {"state-keep", 0},
    {"checkpoint", 0},     {"working-alloc", 0}, {"carry-in", 0},
    {"carry-out", 0},      {"pack-build", 0},    {"pack-alloc", 0},
    {"pack-compute", 0},   {"replace", 0},       {"classify", 0},
    {"compose-rows", 0},
}};

static fault_site & find_site(const char * name) {
    for (fault_site & site : sites) {
        if (strcmp(site.name, name) == 0) {
            return site;
        }
    }
    fail(KVG_INVALID_ARGUMENT, "no fault site is called '%s'", name);
}

void fault_arm(const char * site, int64_t countdown) { find_site(site).countdown = countdown; }

bool fault_hit(const char * site) {
    fault_site & found = find_site(site);
    return found.countdown > 0 && --found.countdown == 0;
}

bool fault_active(const char * site) { return find_site(site).countdown != 0; }

int64_t fault_value(const char * site) { return find_site(site).countdown; }

} // namespace kvg

#endif

namespace kvg {

void fault_point(const char * site) {
    if (fault_hit(site)) {
        fail(KVG_DEVICE, "injected fault at '%s'", site);
    }
}

} // namespace kvg
