#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace kvg {

static std::string vstrformat(const char * format, va_list args) {
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(nullptr, 0, format, again);
    va_end(again);
    std::string text(length > 0 ? static_cast<size_t>(length) + 1 : 1, '\0');
    vsnprintf(text.data(), text.size(), format, args);
    text.pop_back();
    return text;
}

std::string strformat(const char * format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vstrformat(format, args);
    va_end(args);
    return text;
}

void fail(kvg_status status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vstrformat(format, args);
    va_end(args);
    throw error(status, text);
}

} // namespace kvg
