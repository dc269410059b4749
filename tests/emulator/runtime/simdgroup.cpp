// Functions that threads of a simdgroup perform together. By the time one of these runs, all taking part wait with their
// operands in Thread::op, so that it runs once: as 8x8 matrices in whole rows, and typed loops over lanes elsewhere.
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace emu {
namespace {

typedef float Row __attribute__((ext_vector_type(8)));
typedef _Float16 HalfRow __attribute__((ext_vector_type(8)));
typedef uint32_t UintRow __attribute__((ext_vector_type(8)));
typedef uint16_t UshortRow __attribute__((ext_vector_type(8)));

// Lane l (bits b4 … b0) holds row 4·b4 + 2·b2 + b1, columns 4·b3 + 2·b0 and the next.
constexpr unsigned lane_row(unsigned l) { return (l >> 2 & 4) | (l >> 1 & 3); }
constexpr unsigned lane_column(unsigned l) { return (l >> 1 & 4) | (l << 1 & 2); }
constexpr unsigned lane_of(unsigned row, unsigned column) { return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1; }

UshortRow round_bfloat(Row v) {
  UintRow u;
  memcpy(&u, &v, sizeof u);
  UintRow rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  UintRow nan = (UintRow)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((rounded & ~nan) | ((u >> 16 | 0x40) & nan), UshortRow);
}
Row widen_bfloat(UshortRow v) {
  UintRow u = __builtin_convertvector(v, UintRow) << 16;
  Row r;
  memcpy(&r, &u, sizeof r);
  return r;
}

unsigned element_size(unsigned type) { return (type & 3) == EMU_MATRIX_F32 ? 4 : 2; }

// Gathers the lanes' pairs into rows. `poisoned` is set if an element was never given a value.
void gather(const void *const *lanes, unsigned type, Row *rows, bool *poisoned) {
  if (type == EMU_MATRIX_F32) {
    alignas(32) uint64_t flat[32];
    for (unsigned row = 0; row < 8; row++)
      for (unsigned c = 0; c < 8; c += 2) memcpy(&flat[row * 4 + c / 2], lanes[lane_of(row, c)], 8);
    memcpy(rows, flat, sizeof flat);
    UintRow bad = 0;
    for (unsigned row = 0; row < 8; row++) {
      UintRow u;
      memcpy(&u, &rows[row], sizeof u);
      bad |= (UintRow)((u | EMU_QUIET_F32) == (EMU_POISON_F32 | EMU_QUIET_F32));
    }
    if (EMU_UNLIKELY(__builtin_reduce_or(bad) != 0)) *poisoned = true;
    return;
  }
  alignas(16) uint32_t flat[32];
  for (unsigned row = 0; row < 8; row++)
    for (unsigned c = 0; c < 8; c += 2) memcpy(&flat[row * 4 + c / 2], lanes[lane_of(row, c)], 4);
  UshortRow bad = 0;
  for (unsigned row = 0; row < 8; row++) {
    UshortRow u;
    memcpy(&u, flat + row * 4, 16);
    uint16_t quiet = type == EMU_MATRIX_F16 ? EMU_QUIET_F16 : EMU_QUIET_BF16, poison = type == EMU_MATRIX_F16 ? EMU_POISON_F16 : EMU_POISON_BF16;
    bad |= (UshortRow)((u | quiet) == (uint16_t)(poison | quiet));
    if (type == EMU_MATRIX_F16) {
      HalfRow h;
      memcpy(&h, &u, sizeof h);
      rows[row] = __builtin_convertvector(h, Row);
    } else {
      rows[row] = widen_bfloat(u);
    }
  }
  if (EMU_UNLIKELY(__builtin_reduce_or(bad) != 0)) *poisoned = true;
}

void scatter(void *const *lanes, uint64_t mask, unsigned type, const Row *rows) {
  if (type == EMU_MATRIX_F32) {
    const uint64_t *flat = (const uint64_t *)rows;
    for (unsigned row = 0; row < 8; row++)
      for (unsigned c = 0; c < 8; c += 2) {
        unsigned l = lane_of(row, c);
        if (mask >> l & 1) memcpy(lanes[l], &flat[row * 4 + c / 2], 8);
      }
    return;
  }
  for (unsigned row = 0; row < 8; row++) {
    uint32_t flat[4];
    if (type == EMU_MATRIX_F16) {
      HalfRow h = __builtin_convertvector(rows[row], HalfRow);
      memcpy(flat, &h, sizeof flat);
    } else {
      UshortRow u = round_bfloat(rows[row]);
      memcpy(flat, &u, sizeof flat);
    }
    for (unsigned c = 0; c < 8; c += 2) {
      unsigned l = lane_of(row, c);
      if (mask >> l & 1) memcpy(lanes[l], &flat[c / 2], 4);
    }
  }
}

}  // namespace

// ---- 8x8 matrices ---------------------------------------------------------------------------------------------------

// A matrix function wants every lane, 64-wide simdgroups only their lower half's map; reports and says which lanes to use.
static bool whole_simdgroup(Machine &m, Simdgroup &g, uint64_t mask) {
  uint64_t all = 0xffffffffull;
  if (EMU_LIKELY((mask & all) == all)) return true;
  if (m.checked && !g.mixed && mask == g.alive) {
    Thread &t = m.threads[g.first + __builtin_ctzl(mask)];
    m.report(EMU_REPORT_DIVERGENT_SIMDGROUP, t.pc, "a matrix function is reached by " + std::to_string(__builtin_popcountl(mask)) + " of 32 threads: the others have returned or do not exist", true,
             {t.index}, nullptr, nullptr, 0, 0, false, nullptr, (uint64_t)__builtin_popcountl(mask));
  }
  return false;
}

alignas(64) static unsigned char zeros[64];
alignas(64) static thread_local unsigned char sink[64];

void Machine::matrix_multiply(Simdgroup &g, uint64_t mask) {
  counters.matrix_multiply_accumulates++;
  Thread *lanes = &threads[g.first];
  Thread &first = lanes[__builtin_ctzl(mask)];
  bool whole = whole_simdgroup(*this, g, mask);
  const void *a[32], *b[32], *c[32];
  void *out[32];
  for (unsigned l = 0; l < 32; l++) {
    const Operation &op = lanes[l].op;
    if (whole || (mask >> l & 1)) a[l] = op.in[0], b[l] = op.in[1], c[l] = op.in[2], out[l] = op.out;
    else a[l] = b[l] = c[l] = zeros, out[l] = sink;
  }
  uint32_t types = first.op.code;
  for (unsigned i = 0; i < 3; i++) private_operand(first.op.in[i], 2 * element_size(types >> (2 * i + 2)), false, first.pc);
  private_operand(first.op.out, 2 * element_size(types), true, first.pc);
  Row ra[8], rb[8], rc[8];
  bool poisoned_a = false, poisoned_b = false, poisoned_c = false;
  gather(a, types >> 2 & 3, ra, &poisoned_a);
  gather(b, types >> 4 & 3, rb, &poisoned_b);
  if (first.op.in[2]) gather(c, types >> 6 & 3, rc, &poisoned_c);
  else memset(rc, 0, sizeof rc);
  if (EMU_UNLIKELY(poisoned_a || poisoned_b || poisoned_c) && checked)
    report(EMU_REPORT_UNINITIALISED_PRIVATE, first.pc,
           std::string("the ") + (poisoned_a ? "left operand" : poisoned_b ? "right operand" : "accumulator") + " of a matrix product holds elements that were never given a value", true, {first.index});
  for (unsigned row = 0; row < 8; row++) {
    Row sum = rc[row];
    for (unsigned k = 0; k < 8; k++) sum = __builtin_elementwise_fma((Row)ra[row][k], rb[k], sum);
    rc[row] = sum;
  }
  scatter(out, mask, types & 3, rc);
}

namespace {
struct Block {  // an 8x8 block in memory: row i of memory starts at base + i * pitch
  unsigned char *base;
  int64_t pitch;
  bool transposed;
};
Block locate(const Thread &t, const void *p) {
  unsigned e = element_size(t.op.code);
  Block b;
  b.transposed = t.op.code & EMU_MATRIX_TRANSPOSED;
  b.pitch = (int64_t)t.op.stride * e;
  // With the transposition, the origin's x counts rows of memory, as it counts columns of the matrix.
  uint64_t row = b.transposed ? t.op.x : t.op.y, column = b.transposed ? t.op.y : t.op.x;
  b.base = (unsigned char *)p + (int64_t)row * b.pitch + (int64_t)column * e;
  return b;
}
}  // namespace

// Bounds, cells and counters of a whole block. False: the threadgroup must not go on.
static void check_block(Machine &m, Simdgroup &g, uint64_t mask, const Block &b, unsigned e, bool write, const void *pc) {
  Dispatch &d = *m.d;
  Thread *lanes = &m.threads[g.first];
  size_t row_bytes = 8 * e;
  Thread &first = lanes[__builtin_ctzl(mask)];
  if (EMU_UNLIKELY((uintptr_t)b.base & (e - 1)))
    m.report(EMU_REPORT_MISALIGNED, pc, "a matrix at an address that is not a multiple of its element size", true, {first.index}, nullptr, nullptr, 0, row_bytes, write);
  for (unsigned row = 0; row < 8; row++) {
    unsigned char *p = b.base + row * b.pitch;
    size_t offset = (size_t)(p - m.arena);
    bool shared = offset < m.arena_size;
    bool whole = false;
    const Binding *binding = nullptr;
    if (shared) {
      for (const SharedRange &r : d.shared)
        if (offset >= r.begin && offset + row_bytes <= r.end) whole = true;
    } else {
      for (const Binding &c : d.bindings)
        if (p >= c.begin && p + row_bytes <= c.end && (c.writable || !write)) {
          whole = true;
          if (!binding || c.writable) binding = &c;
        }
    }
    if (EMU_UNLIKELY(!whole)) {  // element by element, for an exact report
      for (unsigned c = 0; c < 8; c++) {
        unsigned lane = b.transposed ? lane_of(c, row) : lane_of(row, c);
        m.current = &lanes[mask >> lane & 1 ? lane : __builtin_ctzl(mask)];
        m.access((uintptr_t)p + c * e, e, write, false, pc);
      }
      continue;
    }
    if (shared) {
      (write ? m.counters.threadgroup_bytes_stored : m.counters.threadgroup_bytes_loaded) += row_bytes;
      if (!b.transposed)
        for (unsigned c = 0; c < 8; c += 2) m.shared_cells((uint32_t)(offset + c * e), 2 * e, write, false, &lanes[lane_of(row, c)], pc);
      else
        for (unsigned c = 0; c < 8; c++) m.shared_cells((uint32_t)(offset + c * e), e, write, false, &lanes[lane_of(c, row)], pc);
    } else {
      (write ? m.counters.device_bytes_stored : m.counters.device_bytes_loaded) += row_bytes;
      if (!write) m.loaded_lines(*binding, p, row_bytes);
      if (binding->region)
        for (unsigned c = 0; c < 8; c++) m.device_cells(binding->region, p + c * e, e, write, false, &lanes[b.transposed ? lane_of(c, row) : lane_of(row, c)], pc, binding);
    }
  }
}

static void uniform_arguments(Machine &m, Simdgroup &g, uint64_t mask, bool store) {
  Thread *lanes = &m.threads[g.first];
  const Operation &a = lanes[__builtin_ctzl(mask)].op;
  const void *p = store ? a.out : a.in[0];
  for (uint64_t k = mask & (mask - 1); k; k &= k - 1) {
    const Operation &o = lanes[__builtin_ctzl(k)].op;
    if (EMU_UNLIKELY((store ? o.out : o.in[0]) != p || o.stride != a.stride || o.x != a.x || o.y != a.y || o.code != a.code)) {
      m.report(EMU_REPORT_INVALID_VALUE, lanes[__builtin_ctzl(mask)].pc, "threads of a simdgroup give a matrix function different addresses, strides or origins", true,
               {g.first + (uint32_t)__builtin_ctzl(mask), g.first + (uint32_t)__builtin_ctzl(k)});
      return;
    }
  }
}

void Machine::matrix_load(Simdgroup &g, uint64_t mask) {
  Thread *lanes = &threads[g.first];
  Thread &first = lanes[__builtin_ctzl(mask)];
  bool all = whole_simdgroup(*this, g, mask);
  unsigned type = first.op.code & 3, e = element_size(type);
  Block b = locate(first, first.op.in[0]);
  if (checked) {
    Thread *self = current;
    private_operand(first.op.out, 2 * e, true, first.pc);
    uniform_arguments(*this, g, mask, false);
    check_block(*this, g, mask, b, e, false, first.pc);
    current = self;
  }
  for (unsigned row = 0; row < 8; row++) {
    const unsigned char *p = b.base + row * b.pitch;
    if (!b.transposed) {
      for (unsigned c = 0; c < 8; c += 2) {
        unsigned l = lane_of(row, c);
        if (all || (mask >> l & 1)) {
          if (e == 4) memcpy(lanes[l].op.out, p + c * 4, 8);
          else memcpy(lanes[l].op.out, p + c * 2, 4);
        }
      }
    } else {
      for (unsigned c = 0; c < 8; c++) {
        unsigned l = lane_of(c, row);
        if (all || (mask >> l & 1)) memcpy((unsigned char *)lanes[l].op.out + (row & 1) * e, p + c * e, e);
      }
    }
  }
}

void Machine::matrix_store(Simdgroup &g, uint64_t mask) {
  Thread *lanes = &threads[g.first];
  Thread &first = lanes[__builtin_ctzl(mask)];
  bool all = whole_simdgroup(*this, g, mask);
  unsigned type = first.op.code & 3, e = element_size(type);
  Block b = locate(first, first.op.out);
  if (checked) {
    Thread *self = current;
    private_operand(first.op.in[0], 2 * e, false, first.pc);
    uniform_arguments(*this, g, mask, true);
    check_block(*this, g, mask, b, e, true, first.pc);
    current = self;
    Row rows[8];
    const void *in[32];
    bool poisoned = false;
    for (unsigned l = 0; l < 32; l++) in[l] = all || (mask >> l & 1) ? lanes[l].op.in[0] : zeros;
    gather(in, type, rows, &poisoned);
    if (EMU_UNLIKELY(poisoned))
      report(EMU_REPORT_UNINITIALISED_PRIVATE, first.pc, "a matrix is stored that holds elements which were never given a value", true, {first.index});
  }
  for (unsigned row = 0; row < 8; row++) {
    unsigned char *p = b.base + row * b.pitch;
    if (!b.transposed) {
      for (unsigned c = 0; c < 8; c += 2) {
        unsigned l = lane_of(row, c);
        if (all || (mask >> l & 1)) memcpy(p + c * e, lanes[l].op.in[0], 2 * e);
      }
    } else {
      for (unsigned c = 0; c < 8; c++) {
        unsigned l = lane_of(c, row);
        if (all || (mask >> l & 1)) memcpy(p + c * e, (const unsigned char *)lanes[l].op.in[0] + (row & 1) * e, e);
      }
    }
  }
  if (EMU_UNLIKELY(pending.set)) settle();
}

// ---- shuffles, reductions, votes ------------------------------------------------------------------------------------

namespace {

struct Half { _Float16 v; };
struct Bfloat { uint16_t v; };
template <class T> struct Arithmetic {
  static T load(const void *p) { T v; memcpy(&v, p, sizeof v); return v; }
  static void store(void *p, T v) { memcpy(p, &v, sizeof v); }
  using Value = T;
};
template <> struct Arithmetic<Half> {
  using Value = _Float16;
  static Value load(const void *p) { Value v; memcpy(&v, p, 2); return v; }
  static void store(void *p, Value v) { memcpy(p, &v, 2); }
};
struct BfloatValue {  // float, rounded after each operation
  float f;
  static float round(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) <= 0x7f800000u) u = (u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
  }
  BfloatValue operator+(BfloatValue o) const { return {round(f + o.f)}; }
  BfloatValue operator*(BfloatValue o) const { return {round(f * o.f)}; }
  bool operator<(BfloatValue o) const { return f < o.f; }
  bool operator!=(BfloatValue o) const { return f != o.f; }
};
template <> struct Arithmetic<Bfloat> {
  using Value = BfloatValue;
  static Value load(const void *p) { uint16_t h; memcpy(&h, p, 2); uint32_t u = (uint32_t)h << 16; Value v; memcpy(&v.f, &u, 4); return v; }
  static void store(void *p, Value v) { uint32_t u; memcpy(&u, &v.f, 4); uint16_t h = (uint16_t)(u >> 16); memcpy(p, &h, 2); }
};

template <class V> V combine(uint32_t op, V a, V b) {
  switch (op) {
    case EMU_SUM: case EMU_PREFIX_INCLUSIVE_SUM: case EMU_PREFIX_EXCLUSIVE_SUM: return a + b;
    case EMU_PRODUCT: case EMU_PREFIX_INCLUSIVE_PRODUCT: case EMU_PREFIX_EXCLUSIVE_PRODUCT: return a * b;
    case EMU_MIN: return a != a ? b : b != b ? a : b < a ? b : a;
    case EMU_MAX: return a != a ? b : b != b ? a : a < b ? b : a;
    default: break;
  }
  if constexpr (std::is_integral<V>::value) {
    if (op == EMU_AND) return a & b;
    if (op == EMU_OR) return a | b;
    if (op == EMU_XOR) return a ^ b;
  }
  return a;
}
template <class V> V one(int v) {
  if constexpr (std::is_same<V, BfloatValue>::value) return {(float)v};
  else return (V)v;
}

// One component over one span of lanes (a simdgroup, or a quad).
template <class T> void reduce(Thread *lanes, uint64_t mask, unsigned begin, unsigned span, uint32_t op, size_t at) {
  using A = Arithmetic<T>;
  using V = typename A::Value;
  V value[64];
  bool has[64];
  for (unsigned i = 0; i < span; i++) {
    has[i] = mask >> (begin + i) & 1;
    if (has[i]) value[i] = A::load((const char *)lanes[begin + i].op.in[0] + at);
  }
  if (op >= EMU_PREFIX_INCLUSIVE_SUM) {
    bool exclusive = op == EMU_PREFIX_EXCLUSIVE_SUM || op == EMU_PREFIX_EXCLUSIVE_PRODUCT;
    V sum = one<V>(op == EMU_PREFIX_INCLUSIVE_PRODUCT || op == EMU_PREFIX_EXCLUSIVE_PRODUCT ? 1 : 0);
    for (unsigned i = 0; i < span; i++) {
      if (!has[i]) continue;
      V next = combine(op, sum, value[i]);
      A::store((char *)lanes[begin + i].op.out + at, exclusive ? sum : next);
      sum = next;
    }
    return;
  }
  // Pairwise, as a butterfly would: lanes that are absent are skipped.
  for (unsigned step = 1; step < span; step *= 2)
    for (unsigned i = 0; i < span; i += 2 * step)
      if (has[i + step]) value[i] = has[i] ? combine(op, value[i], value[i + step]) : value[i + step], has[i] = true;
  for (unsigned i = 0; i < span; i++)
    if (mask >> (begin + i) & 1) A::store((char *)lanes[begin + i].op.out + at, value[0]);
}

size_t type_bytes(uint32_t type) {
  switch (type) {
    case EMU_I8: case EMU_U8: return 1;
    case EMU_F16: case EMU_BF16: case EMU_I16: case EMU_U16: return 2;
    case EMU_I64: case EMU_U64: return 8;
    default: return 4;
  }
}

}  // namespace

void Machine::simd(Simdgroup &g, uint64_t mask, bool divergent) {
  Thread *lanes = &threads[g.first];
  Thread &first = lanes[__builtin_ctzl(mask)];
  uint32_t op = first.op.code & 63, type = first.op.type, count = first.op.count;
  bool quad = first.op.code & EMU_QUAD;
  unsigned width = quad ? 4 : d->simd_width;
  size_t bytes = type_bytes(type), total = bytes * count;
  for (unsigned begin = 0; begin < d->simd_width; begin += width) {
    uint64_t span = (width == 64 ? ~0ull : (1ull << width) - 1) << begin, here = mask & span;
    if (!here) continue;
    if (op <= EMU_PREFIX_EXCLUSIVE_PRODUCT) {
      if (checked && type == EMU_F32) {
        // the NaN of a variable or a matrix without a value, which a maximum would hide
        for (uint64_t m = here; m; m &= m - 1) {
          unsigned l = (unsigned)__builtin_ctzl(m);
          uint32_t v;
          bool unset = false;
          for (uint32_t c = 0; c < count; c++) memcpy(&v, (const char *)lanes[l].op.in[0] + c * 4, 4), unset |= v == ~0u || (v | EMU_QUIET_F32) == (EMU_POISON_F32 | EMU_QUIET_F32);
          if (EMU_LIKELY(!unset)) continue;
          report(EMU_REPORT_UNINITIALISED_PRIVATE, first.pc, "lane " + std::to_string(l) + " takes part with a variable that was never given a value", true, {g.first + l});
          break;
        }
      }
      for (uint32_t c = 0; c < count; c++) {
        size_t at = c * bytes;
        switch (type) {
          case EMU_F32: reduce<float>(lanes, here, begin, width, op, at); break;
          case EMU_F16: reduce<Half>(lanes, here, begin, width, op, at); break;
          case EMU_BF16: reduce<Bfloat>(lanes, here, begin, width, op, at); break;
          case EMU_I8: reduce<int8_t>(lanes, here, begin, width, op, at); break;
          case EMU_U8: reduce<uint8_t>(lanes, here, begin, width, op, at); break;
          case EMU_I16: reduce<int16_t>(lanes, here, begin, width, op, at); break;
          case EMU_U16: reduce<uint16_t>(lanes, here, begin, width, op, at); break;
          case EMU_I32: reduce<int32_t>(lanes, here, begin, width, op, at); break;
          case EMU_U32: reduce<uint32_t>(lanes, here, begin, width, op, at); break;
          case EMU_I64: reduce<int64_t>(lanes, here, begin, width, op, at); break;
          case EMU_U64: reduce<uint64_t>(lanes, here, begin, width, op, at); break;
        }
      }
      continue;
    }
    if (op <= EMU_IS_FIRST) {
      uint64_t yes = 0;
      for (uint64_t m = here; m; m &= m - 1) {
        unsigned l = (unsigned)__builtin_ctzl(m);
        uint32_t v;
        memcpy(&v, lanes[l].op.in[0], 4);
        if (v) yes |= 1ull << l;
      }
      for (uint64_t m = here; m; m &= m - 1) {
        unsigned l = (unsigned)__builtin_ctzl(m);
        uint64_t r = op == EMU_BALLOT ? yes >> begin : op == EMU_ALL ? yes == here : op == EMU_ANY ? yes != 0 : l == (unsigned)__builtin_ctzl(here);
        memcpy(lanes[l].op.out, &r, 8);
      }
      continue;
    }
    alignas(16) unsigned char values[64 * 32], fills[64 * 32];
    bool fill = op == EMU_FILL_UP || op == EMU_FILL_DOWN;
    for (uint64_t m = here; m; m &= m - 1) {
      unsigned l = (unsigned)__builtin_ctzl(m);
      memcpy(values + (l - begin) * 32, lanes[l].op.in[0], total);
      if (fill) memcpy(fills + (l - begin) * 32, (const char *)lanes[l].op.in[0] + total, total);
    }
    int reader = -1, absent = -1, outside = -1;
    for (uint64_t m = here; m; m &= m - 1) {
      unsigned l = (unsigned)__builtin_ctzl(m);
      unsigned i = l - begin, k = lanes[l].op.parameter;
      int from = (int)i;
      bool filled = false, fill_from = false;
      switch (op) {
        case EMU_BROADCAST_FIRST: from = __builtin_ctzl(here) - (int)begin; break;
        case EMU_BROADCAST:
        case EMU_SHUFFLE_INDEX:
          from = (int)k;
          if (k >= width) outside = (int)l, from = (int)i;
          break;
        case EMU_SHUFFLE_XOR:
          from = (int)(i ^ k);
          if (from >= (int)width) outside = (int)l, from = (int)i;
          break;
        case EMU_SHUFFLE_UP: from = i >= k ? (int)(i - k) : (int)i; break;
        case EMU_SHUFFLE_DOWN: from = i + k < width ? (int)(i + k) : (int)i; break;
        case EMU_ROTATE_UP: from = (int)((i + width - k % width) % width); break;
        case EMU_ROTATE_DOWN: from = (int)((i + k) % width); break;
        case EMU_FILL_UP:
        case EMU_FILL_DOWN: {
          unsigned delta = k & 0xffff, modulo = k >> 16;
          if (!modulo) modulo = width;
          unsigned group = i / modulo * modulo, j = i - group;
          filled = true;
          if (op == EMU_FILL_UP) {
            if (j >= delta) from = (int)(group + j - delta);
            else fill_from = true, from = (int)(group + (modulo + j - delta % modulo) % modulo);
          } else {
            if (j + delta < modulo) from = (int)(group + j + delta);
            else fill_from = true, from = (int)(group + (j + delta) % modulo);
          }
          break;
        }
      }
      (void)filled;
      bool present = here >> (begin + from) & 1;
      if (!present) reader = (int)l, absent = (int)(begin + from);
      const unsigned char *source = (fill_from ? fills : values) + from * 32;
      static const unsigned char nothing[32] = {};
      memcpy(lanes[l].op.out, present ? source : nothing, total);
    }
    if (!checked) continue;
    if (EMU_UNLIKELY(outside >= 0))
      report(EMU_REPORT_INVALID_VALUE, first.pc, "lane index " + std::to_string(lanes[outside].op.parameter) + " is outside the " + (quad ? "quad" : "simdgroup"), true, {g.first + (uint32_t)outside});
    uint64_t returned = g.existing & span & ~g.alive;
    if (EMU_UNLIKELY(returned != 0) && !divergent && op >= EMU_BROADCAST && reader < 0)
      report(EMU_REPORT_DIVERGENT_SIMDGROUP, first.pc,
             std::to_string(__builtin_popcountl(here)) + " of " + std::to_string(__builtin_popcountl(g.existing & span)) + " threads reach this function, the others have returned", true,
             {first.index, g.first + (uint32_t)__builtin_ctzl(returned)}, nullptr, nullptr, 0, 0, false, nullptr, (uint64_t)__builtin_popcountl(here));
    if (EMU_UNLIKELY(reader >= 0) && !divergent) {
      bool never = !(g.existing >> absent & 1);
      report(EMU_REPORT_DIVERGENT_SIMDGROUP, first.pc,
             "lane " + std::to_string(reader) + " reads lane " + std::to_string(absent) + (never ? ", which has no thread" : ", whose thread has returned"), !never, {g.first + (uint32_t)reader});
    }
  }
}

}  // namespace emu

// ---- what kernels call ----------------------------------------------------------------------------------------------

using namespace emu;

extern "C" EMU_API void emu_barrier(unsigned scope, unsigned flags) {
  Machine &m = *machine;
  Thread *t = m.current;
  t->op.code = flags;
  m.arrive(t, scope ? Wait::kSimdgroupBarrier : Wait::kThreadgroupBarrier, __builtin_return_address(0), __builtin_frame_address(0));
}

extern "C" EMU_API void emu_simd(unsigned code, unsigned type, unsigned count, const void *value, void *result, unsigned parameter) {
  Machine &m = *machine;
  Thread *t = m.current;
  Operation &op = t->op;
  op.code = code, op.type = type, op.count = count, op.parameter = parameter, op.in[0] = value, op.out = result;
  m.arrive(t, Wait::kSimd, __builtin_return_address(0), __builtin_frame_address(0));
}

// Without checks a thread loads its two elements of a matrix itself: what that needs of others, barriers have to order anyway.
static void own_elements(const Thread &t) {
  if (t.lane >= 32) return;
  size_t e = element_size(t.op.code), row = lane_row(t.lane), column = lane_column(t.lane);
  Block b = locate(t, t.op.in[0]);
  unsigned char *out = (unsigned char *)t.op.out;
  if (!b.transposed) {
    const unsigned char *p = b.base + (int64_t)row * b.pitch + column * e;
    if (e == 4) memcpy(out, p, 8);
    else memcpy(out, p, 4);
  } else {
    for (unsigned i = 0; i < 2; i++) memcpy(out + i * e, b.base + (int64_t)(column + i) * b.pitch + row * e, e);
  }
}

extern "C" EMU_API void emu_matrix_load(void *fragment, const void *p, uint64_t stride, uint64_t x, uint64_t y, unsigned form) {
  Machine &m = *machine;
  Thread *t = m.current;
  Operation &op = t->op;
  op.code = form, op.out = fragment, op.in[0] = p, op.stride = stride, op.x = x, op.y = y;
  if (!m.checked) return own_elements(*t);
  m.arrive(t, Wait::kMatrixLoad, __builtin_return_address(0), __builtin_frame_address(0));
}

extern "C" EMU_API void emu_matrix_store(const void *fragment, void *p, uint64_t stride, uint64_t x, uint64_t y, unsigned form) {
  Machine &m = *machine;
  Thread *t = m.current;
  Operation &op = t->op;
  op.code = form, op.out = p, op.in[0] = fragment, op.stride = stride, op.x = x, op.y = y;
  m.arrive(t, Wait::kMatrixStore, __builtin_return_address(0), __builtin_frame_address(0));
}

extern "C" EMU_API void emu_matrix_multiply(void *d, const void *a, const void *b, const void *c, unsigned types) {
  Machine &m = *machine;
  Thread *t = m.current;
  Operation &op = t->op;
  op.code = types, op.out = d, op.in[0] = a, op.in[1] = b, op.in[2] = c;
  m.arrive(t, Wait::kMatrixMultiply, __builtin_return_address(0), __builtin_frame_address(0));
}

extern "C" EMU_API void emu_count_exponentials(unsigned n) { machine->counters.exponentials += n; }
extern "C" EMU_API unsigned emu_lane() { return machine->current->lane; }
extern "C" EMU_API unsigned emu_simd_width() { return machine->d->simd_width; }
extern "C" EMU_API void emu_fence(unsigned flags, unsigned order, unsigned scope) {
  (void)order;
  if ((flags & 1) && scope == 2) machine->d->device_fences.store(1, std::memory_order_relaxed);
}

template <class T> static uint64_t atomic_word(unsigned op, T *p, uint64_t bits, uint64_t *expected) {
  T v;
  memcpy(&v, &bits, sizeof v);
  T old;
  if (op == EMU_ATOMIC_LOAD) {
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  } else if (op == EMU_ATOMIC_STORE) {
    __atomic_store(p, &v, __ATOMIC_SEQ_CST);
    return 0;
  } else if (op == EMU_ATOMIC_COMPARE_EXCHANGE) {
    T e;
    memcpy(&e, expected, sizeof e);
    __atomic_compare_exchange(p, &e, &v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    memcpy(expected, &e, sizeof e);
    old = e;
  } else {
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    T next;
    do {
      next = old;
      switch (op) {
        case EMU_ATOMIC_ADD: next = old + v; break;
        case EMU_ATOMIC_SUB: next = old - v; break;
        case EMU_ATOMIC_MIN: next = v < old ? v : old; break;
        case EMU_ATOMIC_MAX: next = old < v ? v : old; break;
        case EMU_ATOMIC_EXCHANGE: next = v; break;
        default:
          if constexpr (std::is_integral<T>::value) {
            if (op == EMU_ATOMIC_AND) next = old & v;
            if (op == EMU_ATOMIC_OR) next = old | v;
            if (op == EMU_ATOMIC_XOR) next = old ^ v;
          }
      }
    } while (!__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  }
  uint64_t out = 0;
  memcpy(&out, &old, sizeof old);
  return out;
}

extern "C" EMU_API uint64_t emu_atomic(unsigned op, unsigned type, void *p, uint64_t value, uint64_t *expected) {
  Machine &m = *machine;
  m.counters.atomics++;
  size_t size = type_bytes(type);
  if (m.checked) {
    const void *pc = __builtin_return_address(0);
    if ((uintptr_t)p & (size - 1)) m.report(EMU_REPORT_MISALIGNED, pc, "an atomic function on an address that is not a multiple of its size", true, {m.current->index});
    if (op != EMU_ATOMIC_STORE) m.access((uintptr_t)p, size, false, true, pc);
    if (op != EMU_ATOMIC_LOAD) m.access((uintptr_t)p, size, true, true, pc);
  }
  switch (type) {
    case EMU_F32: return atomic_word(op, (float *)p, value, expected);
    case EMU_I32: return atomic_word(op, (int32_t *)p, value, expected);
    case EMU_U32: return atomic_word(op, (uint32_t *)p, value, expected);
    case EMU_I64: return atomic_word(op, (int64_t *)p, value, expected);
    case EMU_U64: return atomic_word(op, (uint64_t *)p, value, expected);
    case EMU_U8: return atomic_word(op, (uint8_t *)p, value, expected);
    default: return 0;
  }
}
