// What a small decoder computes between its matrix products, in one call each instead of ten calls
// of torch. `kernels.py` compiles this file and declares its functions.
//
// Tensors are contiguous and float32 unless their type says otherwise. A row's sums have an order
// that depends on nothing beside it, so that a token is the same to the last bit in any batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t BLOCK = 64;  // tokens of a vocabulary that are summed before they are searched
constexpr int64_t CHUNK = 32;  // numbers of a value that are summed in registers

// Adds up term(0) … term(count - 1).
template <typename Number, typename Count, typename Term>
inline Number sum(Count count, Term term) {
    Number total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += term(i);
    return total;
}

inline float largest(const float* numbers, int64_t count) {
    float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < count; ++i) highest = std::max(highest, numbers[i]);
    return highest;
}

// e^x for x <= 0, by Cody and Waite's reduction to |f| <= ln(2) / 2 and the polynomial of Cephes'
// expf (two units in the last place). Unlike std::exp, compilers compute it for many x at once.
inline float exponential(float x) {
    float n = std::floor(x * 1.44269504f + 0.5f);
    float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    int32_t bits = (int32_t(std::max(-126.0f, n)) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

inline void normalise(
    const float* in, const float* weight, float epsilon, int64_t size, float* out) {
    float squares = sum<float>(size, [&](int64_t i) { return in[i] * in[i]; });
    float factor = 1.0f / std::sqrt(squares / size + epsilon);
    for (int64_t i = 0; i < size; ++i) out[i] = in[i] * factor * weight[i];
}

// Adds up `count` numbers, at most CHUNK, of each of the values [columns, stride].
template <typename Count>
inline void weigh(const std::vector<float>& weights, const float* values, int64_t stride,
                  Count count, float* out) {
    float sums[CHUNK] = {};
    for (float weight : weights) {
        for (int64_t i = 0; i < count; ++i) sums[i] += weight * values[i];
        values += stride;
    }
    std::copy(sums, sums + count, out);
}

// The mean of the values [length, size], weighted by what the query finds in the keys.
template <typename Size>
inline void look_up(const float* query, const float* keys, const float* values, float scale,
                    Size size, std::vector<float>& weights, float* found) {
    for (float& weight : weights) {
        weight = scale * sum<float>(size, [&](int64_t i) { return query[i] * keys[i]; });
        keys += size;
    }
    int64_t length = weights.size();
    float highest = largest(weights.data(), length);
    for (float& weight : weights) weight = exponential(weight - highest);
    float total = sum<float>(length, [&](int64_t i) { return weights[i]; });
    for (float& weight : weights) weight /= total;

    int64_t start = 0;
    for (; start + CHUNK <= size; start += CHUNK)
        weigh(weights, values + start, size, std::integral_constant<int64_t, CHUNK>(),
              found + start);
    if (start < size) weigh(weights, values + start, size, size - start, found + start);
}

// The sum of the weights up to the end of each block of tokens, in double, so that unlikely tokens
// of a large vocabulary keep their share.
inline std::vector<double> ends_of_blocks(const std::vector<float>& weights) {
    std::vector<double> ends;
    double total = 0;
    int64_t size = weights.size();
    for (int64_t start = 0; start < size; start += BLOCK) {
        const float* block = weights.data() + start;
        int64_t count = std::min(BLOCK, size - start);
        total += sum<double>(count, [&](int64_t i) { return double(block[i]); });
        ends.push_back(total);
    }
    return ends;
}

}  // namespace

extern "C" {

// The RMS norm of each row: hidden, out [rows, size]; weight [size].
void norm(const float* hidden, const float* weight, float epsilon, float* out, int64_t rows,
          int64_t size) {
    for (int64_t row = 0; row < rows; ++row)
        normalise(hidden + row * size, weight, epsilon, size, out + row * size);
}

// SiLU of the first half of each row, times the second: both [rows, 2 · size], out [rows, size].
void gate(const float* both, float* out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
        const float* gates = both + row * 2 * size;
        const float* ups = gates + size;
        for (int64_t i = 0; i < size; ++i) {
            float small = exponential(-std::abs(gates[i]));
            // 1 / (1 + e^-x) = e^x / (1 + e^x), of which the second cannot overflow where x < 0
            float share = (gates[i] < 0 ? small : 1.0f) / (1.0f + small);
            out[row * size + i] = gates[i] * share * ups[i];
        }
    }
}

// Rotates the queries and keys of states [tokens, heads + 2 · kv_heads, size], which are queries,
// keys and values, in place; with weights [size] they are normalised first. rotations [.., 2, size]
// has the cosines of every position, and the sines, whose first half is negative.
void rotate(float* states, const int64_t* positions, const float* rotations,
            const float* query_norm, const float* key_norm, float epsilon, int64_t tokens,
            int64_t heads, int64_t kv_heads, int64_t size) {
    int64_t half = size / 2;
    for (int64_t token = 0; token < tokens; ++token) {
        const float* cosines = rotations + positions[token] * 2 * size;
        const float* sines = cosines + size;
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            float* state = states + (token * (heads + 2 * kv_heads) + head) * size;
            const float* weight = head < heads ? query_norm : key_norm;
            if (weight) normalise(state, weight, epsilon, size, state);
            for (int64_t i = 0; i < half; ++i) {
                float first = state[i];
                float second = state[i + half];
                state[i] = first * cosines[i] + second * sines[i];
                state[i + half] = second * cosines[i + half] + first * sines[i + half];
            }
        }
    }
}

// Attention of tokens to the earlier ones of their rows, and to themselves. `token_rows` and
// `positions` [tokens] say where they are; keys and values [.., kv_heads, columns, size] are those of
// all rows, and get those of states [tokens, heads + 2 · kv_heads, size]. out [tokens, heads, size].
void attend(const float* states, const int64_t* token_rows, const int64_t* positions, float* keys,
            float* values, float* out, int64_t tokens, int64_t heads, int64_t kv_heads,
            int64_t size, int64_t columns, float scale, int64_t threads) {
    int64_t width = (heads + 2 * kv_heads) * size;
    int64_t shared = heads / kv_heads;
    auto row_of = [&](int64_t token, int64_t kv_head) {
        return (token_rows[token] * kv_heads + kv_head) * columns * size;
    };

    // All of them first: some of the tokens may be of one row.
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
            int64_t place = row_of(token, kv_head) + positions[token] * size;
            const float* key = states + token * width + (heads + kv_head) * size;
            const float* value = key + kv_heads * size;
            std::copy(key, key + size, keys + place);
            std::copy(value, value + size, values + place);
        }

#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; ++token) {
        std::vector<float> weights(positions[token] + 1);
        for (int64_t head = 0; head < heads; ++head) {
            const float* query = states + token * width + head * size;
            int64_t row = row_of(token, head / shared);
            float* found = out + (token * heads + head) * size;
            auto look = [&](auto known_size) {
                look_up(query, keys + row, values + row, scale, known_size, weights, found);
            };
            // Loops over a size that is known are unrolled.
            switch (size) {
                case 32: look(std::integral_constant<int64_t, 32>()); break;
                case 64: look(std::integral_constant<int64_t, 64>()); break;
                case 128: look(std::integral_constant<int64_t, 128>()); break;
                default: look(size);
            }
        }
    }
}

// Draws a token for each row of logits [rows, size], with its temperature and its number in [0, 1),
// both [rows], of the tokens that are allowed [rows, size], or of all. out [2, rows] are the tokens
// and their log-probabilities among all.
void draw(const float* logits, const double* temperatures, const double* uniforms,
          const bool* allowed, double* out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float* own = logits + row * size;
        float temperature = temperatures[row];
        float highest = largest(own, size);
        std::vector<float> weights(size);
        for (int64_t i = 0; i < size; ++i)
            weights[i] = exponential((own[i] - highest) / temperature);

        std::vector<double> ends = ends_of_blocks(weights);
        double normaliser = ends.back();
        if (allowed) {
            for (int64_t i = 0; i < size; ++i) weights[i] *= allowed[row * size + i];
            ends = ends_of_blocks(weights);
        }

        // Rounding may put the target at the end: keep it in the last block with any weight.
        double total = ends.back();
        double target = std::min(uniforms[row] * total, std::nextafter(total, 0.0));
        int64_t block = std::upper_bound(ends.begin(), ends.end() - 1, target) - ends.begin();
        double below = block ? ends[block - 1] : 0;
        int64_t token = block * BLOCK;
        int64_t end = std::min(token + BLOCK, size);
        for (int64_t i = token; i < end && below <= target; ++i)
            if (weights[i] > 0) {
                below += weights[i];
                token = i;
            }
        double logit = (own[token] - highest) / temperature;
        out[row] = token;
        out[rows + row] = logit - std::log(normaliser);
    }
}

}  // extern "C"
