// Fused attention. Without dropout it is the CPU's own flash kernel, so that scaled_dot_product_attention has the same
// bits on both; with dropout it is written out.
#include "aclnn.h"

using namespace emu;

namespace {

// The layouts differ in the order of batch, head, sequence and width; inside everything is [B, N, S, D].
at::Tensor unify(const at::Tensor& t, const std::string& layout, int64_t heads) {
    if (layout == "BNSD") return t;
    if (layout == "BSND") return t.transpose(1, 2);
    if (layout == "BSH") return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2);
    if (layout == "SBH") return t.view({t.size(0), t.size(1), heads, -1}).permute({1, 2, 0, 3});
    TORCH_CHECK(false, "attention layout ", layout, " is not emulated");
}

at::Tensor restore(const at::Tensor& t, const std::string& layout) {
    if (layout == "BNSD") return t;
    if (layout == "BSND") return t.transpose(1, 2);
    if (layout == "BSH") return t.transpose(1, 2).flatten(2);
    return t.permute({2, 0, 1, 3}).flatten(2);
}

struct Attention {
    at::Tensor q, k, v, mask;  // mask: added to the scores, in q's type; undefined for none
    at::Tensor keep;           // dropout: kept elements of the probabilities, undefined for none
    double scale, keep_probability;
    bool causal;
    int64_t key_heads;

    Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& shift,
              const at::Tensor& drop, const at::Tensor& hidden, double scale, double keep_probability, int64_t heads,
              const std::string& layout, int64_t sparse)
        : scale(scale), keep_probability(keep_probability), causal(sparse == 2) {
        TORCH_CHECK(!shift.defined(), "a position shift is not emulated");
        TORCH_CHECK(sparse == 0 || sparse == 2, "sparse mode ", sparse, " is not emulated");
        q = unify(query, layout, heads);
        key_heads = layout.back() == 'H' ? key.size(2) / q.size(3) : layout == "BNSD" ? key.size(1) : key.size(2);
        k = spread(unify(key, layout, key_heads));
        v = spread(unify(value, layout, key_heads));
        if (hidden.defined() && !causal)  // true hides a position
            mask = at::zeros(hidden.sizes(), q.options()).masked_fill_(hidden.to(at::kBool), -INFINITY);
        if (drop.defined() && keep_probability < 1.0) keep = unpack(drop);
    }

    at::Tensor spread(const at::Tensor& t) const {  // one key head serves several query heads
        return t.size(1) == q.size(1) ? t : t.repeat_interleave(q.size(1) / t.size(1), 1);
    }
    at::Tensor gather(const at::Tensor& t) const {
        return key_heads == q.size(1) ? t : t.unflatten(1, {key_heads, -1}).sum(2);
    }

    at::Tensor unpack(const at::Tensor& bits) const {
        auto keep = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
        auto bytes = bits.to(at::kByte).contiguous();
        auto flat = keep.view({-1});
        auto index = at::arange(flat.numel());
        flat.copy_(at::bitwise_and(at::bitwise_right_shift(bytes.view({-1}).index_select(0, index.div(8, "floor")).to(at::kLong),
                                                           index.remainder(8)), 1));
        return keep;
    }

    at::Tensor probabilities() const {
        auto scores = at::matmul(q, k.transpose(-2, -1)) * scale;
        if (causal) {
            auto ahead = at::ones({q.size(2), k.size(2)}, at::kBool).triu(1);
            scores = scores.masked_fill(ahead, -INFINITY);
        }
        if (mask.defined()) scores = scores + mask;
        return at::softmax(scores, -1);
    }
    std::optional<at::Tensor> optional_mask() const { return mask.defined() ? std::optional(mask) : std::nullopt; }
};

}  // namespace

OPERATOR(aclnnFlashAttentionScore, (Tensor) query, (Tensor) key, (Tensor) value, (Tensor) shift, (Tensor) drop,
         (Tensor) padding, (Tensor) hidden, (Ints) prefix, (double) scale, (double) keep, (int64_t) before, (int64_t) after,
         (int64_t) heads, (Text) layout, (int64_t) precise, (int64_t) sparse, (Out) softmax_max, (Out) softmax_sum,
         (Out) softmax, (Out) out) {
    Attention a(query, key, value, shift, drop, hidden, scale, keep, heads, layout, sparse);
    if (a.keep.defined()) {
        put(out, restore(at::matmul(a.probabilities() * a.keep / keep, a.v), layout));
        softmax_max.zero_(), softmax_sum.fill_(1);
        return;
    }
    auto [result, log_sum] =
        at::_scaled_dot_product_flash_attention_for_cpu(a.q, a.k, a.v, 0.0, a.causal, a.optional_mask(), scale);
    put(out, restore(result, layout));
    // The statistics that the backward pass needs: exp(score - max) / sum, with the logarithm of the sum in max.
    softmax_max.copy_(log_sum.unsqueeze(-1).expand_as(softmax_max)), softmax_sum.fill_(1);
}

OPERATOR(aclnnFlashAttentionScoreGrad, (Tensor) query, (Tensor) key, (Tensor) value, (Tensor) grad, (Tensor) shift,
         (Tensor) drop, (Tensor) padding, (Tensor) hidden, (Tensor) softmax_max, (Tensor) softmax_sum, (Tensor) softmax,
         (Tensor) output, (Ints) prefix, (double) scale, (double) keep, (int64_t) before, (int64_t) after, (int64_t) heads,
         (Text) layout, (int64_t) precise, (int64_t) sparse, (Out) grad_query, (Out) grad_key, (Out) grad_value,
         (Out) grad_shift) {
    Attention a(query, key, value, shift, drop, hidden, scale, keep, heads, layout, sparse);
    auto g = unify(grad, layout, heads);
    at::Tensor dq, dk, dv;
    if (a.keep.defined()) {
        auto p = a.probabilities(), kept = a.keep / keep;
        dv = at::matmul((p * kept).transpose(-2, -1), g);
        auto dp = at::matmul(g, a.v.transpose(-2, -1)) * kept;
        auto ds = p * (dp - (dp * p).sum(-1, true)) * scale;
        dq = at::matmul(ds, a.k);
        dk = at::matmul(ds.transpose(-2, -1), a.q);
    } else {
        auto log_sum = softmax_max.select(-1, 0).contiguous();
        std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            g, a.q, a.k, a.v, unify(output, layout, heads), log_sum, 0.0, a.causal, a.optional_mask(), scale);
    }
    put(grad_query, restore(dq, layout));
    put(grad_key, restore(a.gather(dk), layout));
    put(grad_value, restore(a.gather(dv), layout));
}
