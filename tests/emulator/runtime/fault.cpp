// Faults on request, so that the error paths of a program can be run.
//
//   EMU_FAIL="aclrtMemcpyAsync:5:507899,..."   the 5th call of that function, and no other, fails with that code
//                                              ("5+" in place of "5": that call and every later one)
//   EMU_LOST="1" or "1:200"                    device 1 is lost, from the 200th runtime call made with it current on;
//                                              every call then returns 507010 (lost heartbeat)
//   EMU_OPERATORS="aclnnMm:error,..."          what an operator does: `error` (an exception on the device, 507015),
//                                              `wrong` (numbers that are off by one), `crash` (the process aborts);
//                                              with "@mapped" behind it only where an operand is mapped host memory.
//                                              "*" stands for every operator
#include "emulator.h"

#include <cstdlib>
#include <atomic>

namespace emu {

namespace {

struct Failure {
    std::string function;
    long nth;
    bool onwards;
    aclError code;
    long calls = 0;
};

struct Faults {
    std::mutex mutex;
    std::vector<Failure> failures;
    std::map<int, long> lost_after;  // device -> calls left
    std::vector<std::vector<std::string>> operators;

    void fail(const std::string& rules) {
        for (auto& rule : split(rules, ',')) {
            auto part = split(rule, ':');
            if (part.size() != 3) continue;
            failures.push_back({part[0], atol(part[1].c_str()), part[1].back() == '+', (aclError)atol(part[2].c_str())});
        }
    }

    Faults() {
        fail(settings().fail);
        for (auto& rule : split(settings().lost, ',')) {
            auto part = split(rule, ':');
            if (!part[0].empty()) lost_after[atoi(part[0].c_str())] = part.size() > 1 ? atol(part[1].c_str()) : 0;
        }
        for (auto& rule : split(settings().operators, ',')) {
            auto part = split(rule, ':');
            if (part.size() == 2) operators.push_back(part);
        }
    }
};

Faults*& current() {
    static auto* all = new Faults;
    return all;
}

Faults& faults() { return *current(); }

}  // namespace

void read_faults() { current() = new Faults; }

bool lost(int device) {
    auto& f = faults();
    std::lock_guard<std::mutex> guard(f.mutex);
    auto found = f.lost_after.find(device);
    return found != f.lost_after.end() && found->second <= 0;
}

aclError enter(const char* function) {
    if (settings().trace) complain("%s (device %d)", function, current_device());
    auto& f = faults();
    std::lock_guard<std::mutex> guard(f.mutex);
    if (f.failures.empty() && f.lost_after.empty()) return ACL_SUCCESS;
    auto found = f.lost_after.find(current_device());
    if (found != f.lost_after.end() && --found->second < 0)
        return refuse(ACL_ERROR_RT_LOST_HEARTBEAT, "%s: device %d is lost", function, current_device());
    for (auto& rule : f.failures) {
        if (rule.function != function) continue;
        ++rule.calls;
        if (rule.calls == rule.nth || (rule.onwards && rule.calls > rule.nth))
            return refuse(rule.code, "%s: call %ld fails on request", function, rule.calls);
    }
    return ACL_SUCCESS;
}

OperatorFault operator_fault(const std::string& name, bool mapped) {
    for (auto& rule : faults().operators) {
        if (rule[0] != "*" && rule[0] != name) continue;
        auto what = split(rule[1], '@');
        if (what.size() > 1 && what[1] == "mapped" && !mapped) continue;
        if (what[0] == "error") return OperatorFault::error;
        if (what[0] == "wrong") return OperatorFault::wrong;
        if (what[0] == "crash") return OperatorFault::crash;
    }
    return OperatorFault::none;
}

}  // namespace emu

// For tests: lose a device at a chosen moment. What its streams still hold fails with it.
EMU_API void emuLoseDevice(int device) {
    auto& f = emu::faults();
    std::lock_guard<std::mutex> guard(f.mutex);
    f.lost_after[device] = 0;
}

// For tests: more rules of EMU_FAIL, counted from now on.
EMU_API void emuFail(const char* rules) {
    auto& f = emu::faults();
    std::lock_guard<std::mutex> guard(f.mutex);
    f.fail(rules);
}
