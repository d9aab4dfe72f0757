// The environment that shapes the emulated machine, and the one way this library speaks up.
#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emu {

namespace {

std::string text(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

bool flag(const char* name, bool otherwise = false) { return text(name, otherwise ? "1" : "0") != "0"; }

Settings read_environment() {
    Settings s;
    s.devices = atoi(text("EMU_DEVICES", "2").c_str());
    s.hbm = strtoull(text("EMU_HBM", "8589934592").c_str(), nullptr, 0);
    s.soc = text("EMU_SOC", "Ascend910_9391");
    s.cann = text("EMU_CANN", "8.5.0");
    s.driver = text("EMU_DRIVER", "26.0.0");
    s.trace = flag("EMU_TRACE");
    s.logs = flag("EMU_LOG");
    s.map_once = flag("EMU_MAP_ONCE");
    s.unified = flag("EMU_UNIFIED", true);
    s.stale = flag("EMU_STALE");
    s.peers = text("EMU_PEERS", "all");
    s.fail = text("EMU_FAIL", "");
    s.lost = text("EMU_LOST", "");
    s.operators = text("EMU_OPERATORS", "");
    auto jitter = split(text("EMU_JITTER", "0"), ':');
    for (auto& rule : split(text("EMU_DELAY", ""), ',')) {
        auto part = split(rule, ':');
        if (part.size() == 2) s.delay_us[atoi(part[0].c_str())] = atoi(part[1].c_str());
    }
    s.jitter_us = atoi(jitter[0].c_str());
    s.jitter_seed = jitter.size() > 1 ? atoi(jitter[1].c_str()) : 1;
    return s;
}

std::mutex complaint_mutex;
std::string& last_complaint() {
    static auto* line = new std::string;
    return *line;
}

void say(const char* format, va_list arguments) {
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    fprintf(stderr, "[emulator] %s\n", line);
    std::lock_guard<std::mutex> guard(complaint_mutex);
    if (const char* path = getenv("EMU_REPORT"))
        if (FILE* report = fopen(path, "a")) fprintf(report, "%s\n", line), fclose(report);
    last_complaint() = line;
}

}  // namespace

namespace {
Settings& mutable_settings() {
    static auto* read = new Settings(read_environment());
    return *read;
}
}  // namespace

const Settings& settings() { return mutable_settings(); }

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= text.size();) {
        size_t end = std::min(text.find(separator, begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

void complain(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

aclError refuse(aclError code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say((std::string(format) + " [" + std::to_string(code) + "]").c_str(), arguments);
    va_end(arguments);
    return code;
}

std::string recent_complaint() {
    std::lock_guard<std::mutex> guard(complaint_mutex);
    return last_complaint();
}

}  // namespace emu

// For a program forked from one that has loaded the libraries: its own environment counts. Called before any device is used.
EMU_API void emuReadSettings() {
    emu::mutable_settings() = emu::read_environment();
    emu::read_faults();
}
