// Fault points for tests: fault_point("alloc") throws when kvg_test_fault armed that site. Nothing in a normal build.
#pragma once

#include <cstdint>

namespace kvg {

#ifdef KVGRAPH_TEST_HOOKS
void fault_arm(const char * site, int64_t countdown);
void fault_point(const char * site);
#else
inline void fault_point(const char *) {}
#endif

} // namespace kvg
