// objc_msgSend: finds the method for (receiver, selector) and jumps to it with every argument register as the caller left it,
// so one entry serves every method type. Knows nothing of classes.

#if defined(__x86_64__)

.macro SEND name, receiver, selector
  .globl \name
  .type \name, @function
\name:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  subq $192, %rsp
  movq %rdi, -8(%rbp)
  movq %rsi, -16(%rbp)
  movq %rdx, -24(%rbp)
  movq %rcx, -32(%rbp)
  movq %r8, -40(%rbp)
  movq %r9, -48(%rbp)
  movq %rax, -56(%rbp)
  movups %xmm0, -80(%rbp)
  movups %xmm1, -96(%rbp)
  movups %xmm2, -112(%rbp)
  movups %xmm3, -128(%rbp)
  movups %xmm4, -144(%rbp)
  movups %xmm5, -160(%rbp)
  movups %xmm6, -176(%rbp)
  movups %xmm7, -192(%rbp)
  movq \receiver, %rdi
  movq \selector, %rsi
  callq device_find_method
  movq %rax, %r11
  movq -8(%rbp), %rdi
  movq -16(%rbp), %rsi
  movq -24(%rbp), %rdx
  movq -32(%rbp), %rcx
  movq -40(%rbp), %r8
  movq -48(%rbp), %r9
  movq -56(%rbp), %rax
  movups -80(%rbp), %xmm0
  movups -96(%rbp), %xmm1
  movups -112(%rbp), %xmm2
  movups -128(%rbp), %xmm3
  movups -144(%rbp), %xmm4
  movups -160(%rbp), %xmm5
  movups -176(%rbp), %xmm6
  movups -192(%rbp), %xmm7
  leave
  .cfi_def_cfa %rsp, 8
  testq %r11, %r11
  je 1f
  jmpq *%r11
1:
  // a message to nil: zero in every result register; a result in memory stays as it was, as on a Mac
  xorl %eax, %eax
  xorl %edx, %edx
  pxor %xmm0, %xmm0
  pxor %xmm1, %xmm1
  retq
  .cfi_endproc
  .size \name, . - \name
.endm

  .hidden device_find_method
  .text
  SEND objc_msgSend, %rdi, %rsi
  SEND objc_msgSend_fpret, %rdi, %rsi
  // after the structure's address in rdi, receiver and selector move up by one register; rdi and rsi swap roles, so load
  // the receiver before rsi is overwritten
  SEND objc_msgSend_stret, %rsi, %rdx

#elif defined(__aarch64__)

  .text
  .hidden device_find_method
  .globl objc_msgSend
  .type objc_msgSend, %function
objc_msgSend:
  .cfi_startproc
  stp x29, x30, [sp, #-224]!
  .cfi_def_cfa_offset 224
  .cfi_offset x29, -224
  .cfi_offset x30, -216
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  bl device_find_method
  mov x17, x0
  ldp x0, x1, [sp, #16]
  ldp x2, x3, [sp, #32]
  ldp x4, x5, [sp, #48]
  ldp x6, x7, [sp, #64]
  ldr x8, [sp, #80]
  ldp q0, q1, [sp, #96]
  ldp q2, q3, [sp, #128]
  ldp q4, q5, [sp, #160]
  ldp q6, q7, [sp, #192]
  ldp x29, x30, [sp], #224
  .cfi_def_cfa_offset 0
  cbz x17, 1f
  br x17
1:
  // a message to nil: zero in every result register
  mov x0, #0
  mov x1, #0
  movi d0, #0
  movi d1, #0
  movi d2, #0
  movi d3, #0
  ret
  .cfi_endproc
  .size objc_msgSend, . - objc_msgSend

#else
#error "objc_msgSend is written for x86-64 and aarch64"
#endif

  .section .note.GNU-stack, "", %progbits
