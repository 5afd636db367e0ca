#include "device.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include <sched.h>
#include <strings.h>
#include <sys/mman.h>

#include "error.h"

namespace kvg {

int32_t device_count() { return static_cast<int32_t>(ggml_backend_dev_count()); }

static int32_t device_type(ggml_backend_dev_t dev) {
    switch (ggml_backend_dev_type(dev)) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        return KVG_DEVICE_CPU;
    case GGML_BACKEND_DEVICE_TYPE_GPU:
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        return KVG_DEVICE_GPU;
    default:
        return KVG_DEVICE_ACCEL;
    }
}

void device_info(int32_t index, kvg_device_info & out) {
    if (index < 0 || index >= device_count()) {
        fail(KVG_INVALID_ARGUMENT, "no device has index %d: there are %d", index, device_count());
    }
    ggml_backend_dev_t dev = ggml_backend_dev_get(static_cast<size_t>(index));
    const memory found = device_memory(dev);
    out.name = ggml_backend_dev_name(dev);
    out.description = ggml_backend_dev_description(dev);
    out.type = device_type(dev);
    out.memory_free = found.free;
    out.memory_total = found.total;
}

ggml_backend_dev_t cpu_device() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!dev) {
        fail(KVG_DEVICE, "this ggml has no CPU backend; reinstall llama-cpp-python");
    }
    return dev;
}

bool is_cpu(ggml_backend_dev_t dev) { return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; }

ggml_backend_dev_t find_device(const std::string & name) {
    std::string known;
    for (int32_t i = 0; i < device_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(static_cast<size_t>(i));
        const int32_t type = device_type(dev);
        if (type == KVG_DEVICE_ACCEL) {
            continue; // helps the CPU with a few ops, and aborts on the others
        }
        if (strcasecmp(name.c_str(), ggml_backend_dev_name(dev)) == 0 || (name == "auto" && type == KVG_DEVICE_GPU)) {
            return dev;
        }
        known += std::string(known.empty() ? "" : ", ") + ggml_backend_dev_name(dev);
    }
    if (name == "auto") {
        return cpu_device();
    }
    fail(KVG_DEVICE,
         "no device that runs models is called '%s'; there are: %s (and \"auto\"). Others need a llama-cpp-python built for "
         "them",
         name.c_str(), known.c_str());
}

ggml_backend_ptr open_backend(ggml_backend_dev_t dev) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        fail(KVG_DEVICE, "device %s could not be opened", ggml_backend_dev_name(dev));
    }
    return backend;
}

int usable_cpus() {
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? std::max(1, CPU_COUNT(&cpus)) : 1;
}

void set_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set =
        reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set) {
        set(backend, n_threads);
    }
}

uint32_t span_align(ggml_backend_dev_t dev) { return is_cpu(dev) ? 32 : MAX_SPAN_ALIGN; }

memory device_memory(ggml_backend_dev_t dev) {
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    if (is_cpu(dev)) {
        std::ifstream meminfo("/proc/meminfo");
        for (std::string line; std::getline(meminfo, line);) {
            unsigned long long kib = 0;
            if (sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) {
                free = std::min<size_t>(free, kib * 1024);
            }
        }
    }
    return {free, total};
}

void advise_huge_pages(void * begin, size_t n_bytes) {
    constexpr uintptr_t HUGE_PAGE = 2u << 20;
    const auto at = reinterpret_cast<uintptr_t>(begin);
    const uintptr_t first = (at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t last = (at + n_bytes) / HUGE_PAGE * HUGE_PAGE;
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE); // a hint
    }
}

std::string format_bytes(uint64_t bytes) {
    const double mib = static_cast<double>(bytes) / (1024.0 * 1024.0);
    return mib >= 1024.0 ? strformat("%.2f GiB", mib / 1024.0) : strformat("%.2f MiB", mib);
}

} // namespace kvg
