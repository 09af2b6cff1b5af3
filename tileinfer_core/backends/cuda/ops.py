"""DRAFT adapter on provisional kernels."""

from __future__ import annotations
from typing import Any
from kernels import _draft as dr
from kernels import sampling as smp
from kernels.linear_prefill import LinearPrefillConfig, linear_prefill, linear_prefill_residual, linear_prefill_swiglu

MAX_GROUP = 8
SIZE_STEP = 8


def p2(n):
    return 1 << (n - 1).bit_length()


def workspace_specs(model, arch, context):
    specs = {
        f"sample_{k}": v for k, v in smp.sample_workspace_shapes(model.config.vocab_size, smp.SampleConfig()).items()
    }
    specs["square_sums"] = ((16,), "float32")
    return specs


def bucket_pages(pages, max_pages):
    return max_pages


class Ops:
    def __init__(self, launcher, structure):
        self.l, self.s = launcher, structure

    @property
    def records(self):
        return self.l.records

    @property
    def pdl(self):
        return int(self.l.pdl)

    def embed_rows(self, ids, table, x):
        self.l(dr.embed_k, (x.shape[0], 1, 1), (ids, table, x, p2(x.shape[1]), self.pdl))

    def norm_rows(self, x, g, y):
        self.l(dr.norm_k, (x.shape[0], 1, 1), (x, g, y, p2(x.shape[1]), x.shape[1], self.s.rms_norm_eps, self.pdl))

    def linear_rows(self, x, w, bias, y):
        linear_prefill(self.l, x, w, y, config=LinearPrefillConfig(), bias=bias)

    def add_linear_rows(self, x, w, bias, res):
        linear_prefill_residual(self.l, x, w, res, config=LinearPrefillConfig(), bias=bias)

    def swiglu_rows(self, x, w, bias, y):
        linear_prefill_swiglu(self.l, x, w, y, config=LinearPrefillConfig(), bias=bias)

    def rope_rows(self, qkv, qn, kn, cos, sin, start, table, k, v, q):
        s = self.s
        H, K = s.num_attention_heads, s.num_key_value_heads
        self.l(
            dr.rope_k,
            (qkv.shape[0], H + 2 * K, 1),
            (
                qkv,
                qn if s.qk_norm else cos,
                kn if s.qk_norm else cos,
                cos,
                sin,
                start,
                table,
                k,
                v,
                q,
                H,
                K,
                s.head_dim,
                s.rms_norm_eps,
                int(s.qk_norm),
                self.pdl,
            ),
        )

    def attend_rows(self, q, k, v, table, start, out):
        s = self.s
        H, K = s.num_attention_heads, s.num_key_value_heads
        self.l(dr.att_k, (q.shape[0], H, 1), (q, k, v, table, start, out, K, H // K, s.head_dim, self.pdl))

    def scale_row(self, row, rows, g, b):
        self.l(
            dr.embed1_k,
            (1, 1, 1),
            (row, rows, g, b["residual"], b["scaled"], b["square_sums"], p2(rows.shape[1]), self.pdl),
        )

    embed_row = scale_row

    def _lin(self, w, x, bias, b, y, swiglu=0):
        self.l(
            dr.lin_k,
            (-(-w.shape[0] // 8), 1, 1),
            (
                w,
                x,
                bias if bias is not None else w,
                b["square_sums"],
                y,
                64,
                w.shape[1],
                self.s.rms_norm_eps,
                1,
                int(bias is not None),
                swiglu,
                self.pdl,
            ),
        )

    def linear_row(self, w, bias, b):
        self._lin(w, b["scaled"], bias, b, b["qkv"])

    def swiglu_row(self, w, bias, b):
        self._lin(w, b["scaled"], bias, b, b["act"], 1)

    def logits_row(self, w, b):
        self._lin(w, b["scaled"], None, b, b["logits"])

    def attend_row(self, qn, kn, k, v, table, bucket, b):
        self.l(dr.step_start_k, (1, 1, 1), (b["length"], b["start"], self.pdl))
        q = b["rows_q"][:1]
        self.rope_rows(b["qkv"], qn, kn, b["cos"], b["sin"], b["start"], table, k, v, q)
        self.attend_rows(q, k, v, table, b["start"], b["attention"])

    def add_linear_row(self, w, bias, x, g, b):
        self.l(
            dr.res_k,
            (1, 1, 1),
            (
                w,
                x,
                bias if bias is not None else w,
                b["residual"],
                g,
                b["scaled"],
                b["square_sums"],
                p2(w.shape[0]),
                64,
                int(bias is not None),
                self.pdl,
            ),
        )

    def sample(self, b):
        ws = smp.SampleWorkspace(
            **{
                k: b[f"sample_{k}"]
                for k in ("adjusted", "run_maxima", "partials", "won_values", "won_ids", "sorted_values", "sorted_ids")
            }
        )
        smp.sample(
            self.l,
            b["logits"],
            b["token_state"],
            b["settings"],
            b["state"],
            ws,
            b["sampled"],
            b["logprob"],
            config=smp.SampleConfig(),
        )
        self.l(
            dr.advance_k,
            (1, 1, 1),
            (
                b["sampled"],
                b["logprob"],
                b["state"],
                b["length"],
                b["ring"][0],
                b["ring"][1].view("float32"),
                b["ring"].shape[1],
                self.pdl,
            ),
        )
