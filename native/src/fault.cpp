#include "fault.h"

#ifdef KVGRAPH_TEST_HOOKS

#include <array>
#include <cstring>

#include "error.h"

namespace kvg {

struct fault_site {
    const char * name;
    int64_t countdown;
};

// Thread-local, so that a test in one thread can't trip another one's context.
static thread_local std::array<fault_site, 10> sites = {{
    {"cells", 0},
    {"build", 0},
    {"alloc", 0},
    {"compute", 0},
    {"shift-build", 0},
    {"shift-alloc", 0},
    {"shift-compute", 0},
    {"defrag-build", 0},
    {"defrag-alloc", 0},
    {"defrag-compute", 0},
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

void fault_point(const char * site) {
    fault_site & found = find_site(site);
    if (found.countdown > 0 && --found.countdown == 0) {
        fail(KVG_DEVICE, "injected fault at '%s'", site);
    }
}

} // namespace kvg

#endif
