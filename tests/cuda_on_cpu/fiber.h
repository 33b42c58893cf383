// A fiber's place of execution, and going from one to another. Included by runtime.cpp alone.
#pragma once
#include <cstddef>

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
// Saves the callee-saved registers on the old stack and takes them from the new one: ten nanoseconds, where swapcontext
// makes a system call.
struct Context {
    void* stack_pointer;
};
extern "C" void emulator_switch(Context* from, Context* to);
asm(R"(
    .text
    .globl emulator_switch
    .hidden emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, .-emulator_switch
)");
static void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + size);
    *--top = nullptr;  // the return address of entry, which never returns; leaves the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}
#else
#include <ucontext.h>
using Context = ucontext_t;
static void emulator_switch(Context* from, Context* to) { swapcontext(from, to); }
static void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif
