// One exception type for everything that a caller can get wrong or a device can refuse; api.cpp turns it into a status.
#pragma once

#include <stdexcept>
#include <string>

#include "kvgraph.h"

namespace kvg {

class error : public std::runtime_error {
public:
    error(kvg_status status, const std::string & message) : std::runtime_error(message), status_(status) {}
    kvg_status status() const { return status_; }

private:
    kvg_status status_;
};

// Throws error(status, formatted message). Messages say what was wrong, what was expected, what to do.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(kvg_status status, const char * format, ...);

// printf into a string.
__attribute__((format(printf, 1, 2))) std::string strformat(const char * format, ...);

} // namespace kvg
