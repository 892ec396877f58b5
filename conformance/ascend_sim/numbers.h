// Element types: their codes in ACL, sizes, and how one element is read and written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sim {

enum Dtype : int {
  kFloat = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kInt64 = 9,
  kUint64 = 10,
  kDouble = 11,
  kBool = 12,
  kBFloat16 = 27,
};

// Bytes of one element; 0 for a type that is not simulated.
inline size_t size_of(int dtype) {
  switch (dtype) {
    case kInt8: case kUint8: case kBool: return 1;
    case kFloat16: case kBFloat16: case kInt16: case kUint16: return 2;
    case kFloat: case kInt32: case kUint32: return 4;
    case kDouble: case kInt64: case kUint64: return 8;
  }
  return 0;
}

inline bool is_floating(int dtype) {
  return dtype == kFloat || dtype == kFloat16 || dtype == kBFloat16 || dtype == kDouble;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float from_bfloat16(uint16_t half) { return float_of(uint32_t{half} << 16); }

// Round to nearest, ties to even; every NaN becomes one quiet NaN.
inline uint16_t to_bfloat16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, rest = half & 1023;
  if (exponent == 31) return float_of(sign | 0x7F800000 | (rest << 13));
  if (exponent) return float_of(sign | ((exponent + 112) << 23) | (rest << 13));
  const float tiny = std::ldexp(static_cast<float>(rest), -24);
  return sign ? -tiny : tiny;
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0f) return sign | 0x7C00;  // rounds to infinity
  if (magnitude < 6.103515625e-05f)                 // subnormal: a multiple of 2^-24
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 16777216.0f));
  const uint32_t m = bits & 0x7FFFFFFF;
  return sign | static_cast<uint16_t>(((m + 0xFFF + ((m >> 13) & 1)) >> 13) - (112 << 10));
}

template <class Stored, class T>
T load_as(const char* at) {
  Stored value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<T>(value);
}

template <class Stored>
void store_as(char* at, Stored value) {
  std::memcpy(at, &value, sizeof value);
}

// One element as T, which is float, double or int64_t.
template <class T>
T load(int dtype, const char* at) {
  switch (dtype) {
    case kFloat: return load_as<float, T>(at);
    case kDouble: return load_as<double, T>(at);
    case kFloat16: return static_cast<T>(from_float16(load_as<uint16_t, uint16_t>(at)));
    case kBFloat16: return static_cast<T>(from_bfloat16(load_as<uint16_t, uint16_t>(at)));
    case kBool: return static_cast<T>(*at != 0);
    case kInt8: return load_as<int8_t, T>(at);
    case kUint8: return load_as<uint8_t, T>(at);
    case kInt16: return load_as<int16_t, T>(at);
    case kUint16: return load_as<uint16_t, T>(at);
    case kInt32: return load_as<int32_t, T>(at);
    case kUint32: return load_as<uint32_t, T>(at);
    case kInt64: return load_as<int64_t, T>(at);
    case kUint64: return load_as<uint64_t, T>(at);
  }
  return T();  // unreachable: operands are checked before a kernel runs
}

template <class T>
void store(int dtype, char* at, T value) {
  const auto whole = [&] { return static_cast<int64_t>(value); };
  switch (dtype) {
    case kFloat: return store_as(at, static_cast<float>(value));
    case kDouble: return store_as(at, static_cast<double>(value));
    case kFloat16: return store_as(at, to_float16(static_cast<float>(value)));
    case kBFloat16: return store_as(at, to_bfloat16(static_cast<float>(value)));
    case kBool: return store_as(at, static_cast<uint8_t>(value != 0));
    case kInt8: case kUint8: return store_as(at, static_cast<uint8_t>(whole()));
    case kInt16: case kUint16: return store_as(at, static_cast<uint16_t>(whole()));
    case kInt32: case kUint32: return store_as(at, static_cast<uint32_t>(whole()));
    case kInt64: case kUint64: return store_as(at, whole());
  }
}

}  // namespace sim
