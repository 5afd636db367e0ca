// Fault points for tests: what kvg_test_fault armed. A normal build has none of it.
#pragma once

#include <cstdint>

namespace kvg {

#ifdef KVGRAPH_TEST_HOOKS
void fault_arm(const char * site, int64_t countdown);
// whether this pass through the site is the one to fail
bool fault_hit(const char * site);
// whether a fault that changes what is computed is switched on: any countdown but 0
bool fault_active(const char * site);
// the countdown itself, of a site that never counts down
int64_t fault_value(const char * site);
#else
inline bool fault_hit(const char *) { return false; }
inline bool fault_active(const char *) { return false; }
inline int64_t fault_value(const char *) { return 0; }
#endif

// throws error(KVG_DEVICE) when it is
void fault_point(const char * site);

} // namespace kvg
