"""Policies: read, bound to models, checked, and what every error says."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from models import MODELS, TEXT
from torch import nn

import autotp
from autotp.axes import factors
from autotp.choose import choose
from autotp.errors import PolicyError
from autotp.flow import follow
from autotp.match import roles
from autotp.place import place
from autotp.planner import _solve_ranks, analyse, to_plan
from autotp.policy import load, to_policy
from autotp.realise import realise

POLICIES = Path(__file__).parent.parent / "policies"


@functools.cache
def analysed(name, tp):
    model, inputs = MODELS[name](dtype=torch.float32)
    return model, analyse(model, tp, inputs)


def plan_under(source, name, tp=2):
    """The plan of a test model under a policy, checked: as the planner does, on a capture made once."""
    model, found = analysed(name, tp)
    bound = load(source).bind(found.index, tp)
    choice = choose(found.index, tp, bound.veto)
    placement = place(found.index, choice)
    solved = dataclasses.replace(
        found,
        policy=bound,
        choice=choice,
        placement=placement,
        realised=realise(found.index, placement),
        solutions=_solve_ranks(found.index, choice, tp),
    )
    plan = dataclasses.replace(to_plan(model, solved, tp), roles=roles(found.index))
    bound.check(plan, found.index)
    return bound, plan


def parameters(plan):
    return {name: (p.placement, p.layout, p.gradient) for name, p in plan.params.items()}


def replicated(plan):
    return {name for name, p in plan.params.items() if p.layout is None and len(p.shape) > 1}


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def refused(source, name="gpt2", tp=2):
    with pytest.raises(PolicyError) as caught:
        plan_under(source, name, tp)
    return str(caught.value)


# --- the policies that come with autotp -------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, name",
    [
        ("gpt2", "gpt2"),
        ("llama", "llama_gqa"),
        ("llama", "qwen3"),
        ("falcon", "falcon_new"),
        ("bert", "bert"),
    ],
)
def test_a_shipped_policy_gives_the_plan_that_none_gives(file, name):
    _, automatic = plan_under(None, name)
    bound, plan = plan_under(POLICIES / f"{file}.yaml", name)
    assert parameters(plan) == parameters(automatic)
    assert plan.sharded_fraction == 1.0
    assert len(bound.claims) >= 7 and bound.notes == ()


def test_every_shipped_policy_is_tested():
    assert {path.stem for path in POLICIES.glob("*.yaml")} == {"gpt2", "llama", "falcon", "bert"}


def test_of_several_files_those_for_the_model_are_used():
    bound, _ = plan_under(sorted(POLICIES.glob("*.yaml")), "gpt2")
    assert all(claim.rule.where.startswith(str(POLICIES / "gpt2.yaml:")) for claim in bound.claims)
    assert any(
        "bert.yaml:3: not for this model (a GPT2LMHeadModel of model_type gpt2)" in n for n in bound.notes
    )


def test_a_policy_for_another_model_is_refused():
    text = refused(POLICIES / "bert.yaml")
    assert (
        "bert.yaml:3: no policy given is for this model: it is a GPT2LMHeadModel of model_type gpt2." in text
    )


def test_keys_and_values_of_one_head_may_stay_whole():
    _, plan = plan_under(POLICIES / "llama.yaml", "llama_mqa")
    assert plan.params["model.layers.0.self_attn.q_proj.weight"].layout is not None
    forbidding = {"modules": {"model.layers.*.self_attn.k_proj": "k"}, "options": {"kv_replicate": "forbid"}}
    assert "model.layers.0.self_attn.k_proj can't be k: its output is not split" in refused(
        forbidding, "llama_mqa"
    )


# --- what a policy decides --------------------------------------------------------------------------------


def test_replicate_keeps_a_whole_pair_whole():
    _, automatic = plan_under(None, "gpt2")
    _, plan = plan_under({"modules": {"transformer.h.*.mlp": "replicate"}}, "gpt2")
    whole = {f"transformer.h.{i}.mlp.{m}.weight" for i in (0, 1) for m in ("c_fc", "c_proj")}
    assert replicated(plan) - replicated(automatic) == whole
    reason = plan.kept["transformer.h.0.mlp.c_fc.weight"]
    assert "the policy dict['modules']['transformer.h.*.mlp'] keeps transformer.h.0.mlp.c_fc" in reason


def test_replicate_in_one_layer_leaves_the_others():
    _, plan = plan_under({"modules": {"transformer.h.1.attn": "replicate"}}, "gpt2")
    assert plan.params["transformer.h.0.attn.c_attn.weight"].layout is not None
    assert plan.params["transformer.h.1.attn.c_attn.weight"].layout is None


def test_half_a_pair_is_refused_with_the_other_half(tmp_path):
    path = written(tmp_path, 'schema: 1\nmodules:\n  "transformer.h.*.mlp.c_proj": replicate\n')
    text = refused(path)
    assert text.startswith(f"{path}:3: replicating transformer.h.0.mlp.c_proj is half of a pair: ")
    assert "transformer.h.0.mlp.c_fc.weight would be split along the same axis of 256" in text
    assert "(and 1 more like it)" in text


def test_half_an_attention_is_refused():
    text = refused({"modules": {"model.layers.0.self_attn.q_proj": "replicate"}}, "llama_mha")
    assert "is half of a pair: model.layers.0.self_attn.k_proj.weight" in text
    assert "would be split along the same axis of 4" in text


def test_a_role_of_the_other_side_is_refused_with_the_planners_reason(tmp_path):
    text = refused(written(tmp_path, 'modules:\n  "transformer.h.0.mlp.c_proj": column\n'))
    assert "mine.yaml:2: transformer.h.0.mlp.c_proj can't be column: its output is not split" in text
    assert "mine.yaml:2 wants the output of transformer.h.0.mlp.c_proj.weight split, not this axis" in text


def test_column_and_row_are_accepted_where_they_are_right():
    _, plan = plan_under({"modules": {"**.c_fc": "column", "**.mlp.c_proj": "row"}}, "gpt2")
    assert plan.sharded_fraction == 1.0


@pytest.mark.parametrize(
    "name, role, truth",
    [
        ("attn.c_attn", "q", "qkv"),
        ("mlp.c_proj", "mlp_in", "mlp_out"),
        ("attn.c_proj", "mlp_out", "attn_out"),
    ],
)
def test_a_role_that_the_dataflow_contradicts_is_refused(name, role, truth):
    text = refused({"modules": {f"transformer.h.1.{name}": role}})
    assert (
        f"transformer.h.1.{name} is {truth} by its dataflow, not {role}. Give it that role, or none." in text
    )


def test_an_attention_without_a_softmax_may_be_called_one():
    plan_under(
        {"modules": {"transformer.h.*.mlp.c_fc": "v", "transformer.h.*.mlp.c_proj": "attn_out"}}, "gpt2"
    )
    text = refused({"modules": {"transformer.h.*.mlp.c_fc": "attn_out"}})
    assert "transformer.h.0.mlp.c_fc is mlp_in by its dataflow, not attn_out." in text


def test_later_policies_win_and_what_won_is_told():
    bound, plan = plan_under([POLICIES / "llama.yaml", {"modules": {"lm_head": "replicate"}}], "llama_gqa")
    assert plan.params["lm_head.weight"].layout is None
    where = f"{POLICIES / 'llama.yaml'}:15"
    assert (
        f"lm_head.weight: the policy dict['modules']['lm_head'] (replicate) wins over {where} (head)"
        in bound.notes
    )
    _, other = plan_under([{"modules": {"lm_head": "replicate"}}, POLICIES / "llama.yaml"], "llama_gqa")
    assert other.params["lm_head.weight"].layout is not None


def test_uneven_splits_can_be_forbidden():
    _, plan = plan_under(None, "llama_ffn130", 4)
    assert len({plan.params["model.layers.0.mlp.up_proj.weight"].local_shape(r) for r in range(4)}) == 2
    _, plan = plan_under({"options": {"uneven": "forbid"}}, "llama_ffn130", 4)
    assert plan.params["model.layers.0.mlp.up_proj.weight"].layout is None
    assert "130 is no multiple of 4" in plan.kept["model.layers.0.mlp.up_proj.weight"]


def test_replicated_heads_can_be_forbidden():
    _, found = analysed("llama_gqa", 4)
    (name,) = {n for n in found.index.axes.params if n.endswith("layers.0.self_attn.k_proj.weight")}
    groups = factors(found.index.axes.params[name][0])[0]
    assert groups.size == 2
    for word, reason in (
        ("allow", None),
        ("forbid", " forbids replicated heads, and 2 are fewer than the 4 ranks"),
    ):
        bound = load({"options": {"kv_replicate": word}}).bind(found.index, 4)
        veto = bound.veto(groups, follow(found.index, groups))
        assert veto is None if reason is None else veto.endswith(reason)


def test_sequence_parallelism_is_not_ignored(tmp_path):
    path = written(tmp_path, "modules: {}\noptions: {sequence_parallel: true}\n")
    assert refused(path) == f"{path}:2: this version splits no sequences. Set sequence_parallel: false."


# --- layouts ----------------------------------------------------------------------------------------------

FUSED = {
    "gpt2": "transformer.h.*.attn.c_attn",
    "phi3": "model.layers.*.self_attn.qkv_proj",
    "gpt_neox": "gpt_neox.layers.*.attention.query_key_value",
    "falcon_new": "transformer.h.*.self_attention.query_key_value",
    "falcon_mqa": "transformer.h.*.self_attention.query_key_value",
    "codegen": "transformer.h.*.attn.qkv_proj",
}


@pytest.mark.parametrize(
    "name, layout",
    [
        ("gpt2", "[q*h, k*h, v*h]"),
        ("gpt2", "[h*q, kv*k, kv*v]"),
        ("gpt2", "[q*4, k*4, v*4]"),
        ("phi3", "[q*h, k*kv, v*kv]"),
        ("gpt_neox", "h*(q, k, v)"),
        ("gpt_neox", "kv*(q*r, k, v)"),
        ("falcon_new", "kv*(q*r, k, v)"),
        ("falcon_mqa", "[q*h, k, v]"),
        ("codegen", "m*[q*r, v*r, k*r]"),
    ],
)
def test_a_right_layout_is_accepted(name, layout):
    plan_under({"modules": {FUSED[name]: {"role": "qkv", "layout": layout}}}, name)


@pytest.mark.parametrize(
    "name, layout",
    [
        ("gpt2", "h*(q, k, v)"),
        ("gpt2", "[q*h, k*h]"),
        ("gpt2", "[q*3, k*h, v*h]"),
        ("phi3", "kv*(q*r, k, v)"),
        ("phi3", "[q*h, k*h, v*h]"),  # its keys have fewer heads than its queries
        ("gpt_neox", "[q*h, k*h, v*h]"),
        ("falcon_new", "[q*h, k*kv, v*kv]"),
        ("falcon_new", "kv*(q*2, k*2, v)"),
        ("codegen", "m*[q*r, k*r, v*r]"),  # keys and values the wrong way round
    ],
)
def test_a_layout_that_contradicts_the_dataflow_is_refused(name, layout):
    text = refused({"modules": {FUSED[name]: {"role": "qkv", "layout": layout}}}, name)
    assert f"is not laid out as {layout}: the dataflow finds " in text
    assert "the output of " in text and f"{FUSED[name].replace('*', '0')}.weight" in text


def test_both_layouts_are_shown(tmp_path):
    path = written(tmp_path, 'modules:\n\n  "**.c_attn": {layout: "h*(q, k, v)"}\n')
    text = refused(path)
    assert text.startswith(
        f"{path}:3: the output of transformer.h.0.attn.c_attn.weight is not laid out as h*(q, k, v)"
    )
    assert "the dataflow finds 4a*16b|4a*16b|4a*16c" in text


def test_gate_and_up_are_two_pieces():
    pattern = "model.layers.*.mlp.gate_up_proj"
    plan_under({"modules": {pattern: {"role": "mlp_in", "layout": "[gate, up]"}}}, "phi3")
    plan_under({"modules": {pattern: {"role": "mlp_in", "layout": ["gate", "up"]}}}, "phi3")
    assert "[gate, up, down]" in refused({"modules": {pattern: {"layout": "[gate, up, down]"}}}, "phi3")
    assert "n*(gate, up)" in refused({"modules": {pattern: {"layout": "n*(gate, up)"}}}, "phi3")


@pytest.mark.parametrize(
    "layout, message",
    [
        ("[gate, up", "']' expected, 'the end' found"),
        ("[gate,, up]", "a name expected, ',' found"),
        ("gate up", "'up' is left over after 'gate'"),
        ("", "a name expected, 'the end' found"),
        (3, 'a layout is text like "[gate, up]"'),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(layout, message):
    with pytest.raises(PolicyError) as caught:
        load({"modules": {"x": {"layout": layout}}})
    assert message.replace("']' exp", "] exp") in str(caught.value)
    assert str(caught.value).startswith("the policy dict['modules']['x']['layout']: ")


# --- files that are wrong in themselves -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("schema: 1\nmodlues: {}\n", 2, "unknown key 'modlues'. Did you mean modules?"),
        ("schema: 2\n", 1, "schema 2 is unknown. This version reads schema 1."),
        ("match: {klass: X}\n", 1, "unknown key of match 'klass'. Did you mean class?"),
        ("match: {class: [1]}\n", 1, "match.class is a name or a list of names, not [1]."),
        ("match: GPT\nmodules: {}\n", 1, "match must be a mapping, not 'GPT'."),
        ("modules:\n  a: qkv\n  b: attnout\n", 3, "'attnout' is not a role. Did you mean attn_out"),
        ("modules:\n  a: colwise\n", 2, "'colwise' is not a role. That is a style of transformers; the role"),
        ("modules:\n  a:\n", 2, "'a' has no role. It can be: attn_out, column,"),
        ("modules:\n  a: {}\n", 2, "'a' says nothing: give it a role, a layout, or both."),
        ("modules:\n  a: {rol: q}\n", 2, "unknown key of a rule 'rol'. Did you mean role?"),
        ("modules:\n  a: {role: }\n", 2, "the role of 'a' is empty."),
        ("modules:\n  a: [q]\n", 2, "['q'] is not a role."),
        ('modules:\n  a: {role: replicate, layout: "[x, y]"}\n', 2, "'a' is replicated, so its layout"),
        ("modules:\n  a: q\n  c: k\n  a: v\n", 4, "'a' is already given at {file}:2. Keep one of the two."),
        ("modules:\n  're:[': q\n", 2, "'re:[' is not a regex"),
        ("modules: [a]\n", 1, "modules must be a mapping, not ['a']."),
        ("modules:\n  a: q\noptions:\n  unevn: allow\n", 4, "unknown option 'unevn'. Did you mean uneven?"),
        ("options: {uneven: maybe}\n", 1, "option uneven is allow or forbid, not 'maybe'."),
        ("options: {sequence_parallel: 1}\n", 1, "option sequence_parallel is false or true, not 1."),
        ("a: b: c\n", 1, "not YAML: mapping values are not allowed here."),
        ("", 1, "the policy is empty. It needs at least `modules:`"),
        ("- a\n", 1, "a policy must be a mapping, not ['a']."),
        ("model.layers.*.mlp.up: colwize\n", 1, "'colwize' is neither a role nor a parallel style of"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path, text, line, message):
    path = written(tmp_path, text)
    with pytest.raises(PolicyError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: {message.replace('{file}', str(path))}")


def test_a_file_that_is_not_there_is_told_with_its_neighbours(tmp_path):
    written(tmp_path, "schema: 1")
    with pytest.raises(PolicyError, match=r"mien.yaml: the policy can't be read .* Did you mean mine.yaml\?"):
        load(tmp_path / "mien.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="mine.yaml: the policy is not UTF-8 text"):
        load(path)


def test_a_policy_of_a_wrong_type_is_refused():
    with pytest.raises(PolicyError, match="a policy is a path, a dict or a list of these, not a int"):
        load(3)


def test_a_pattern_that_matches_nothing_is_refused_with_close_words(tmp_path):
    path = written(
        tmp_path, "modules:\n  transformer.h.*.attn.c_atn: qkv\n  transformer.h.*.mlp.c_fc: mlp_in\n"
    )
    text = refused(path)
    assert text.startswith(
        f"{path}:2: 'transformer.h.*.attn.c_atn' matches no module or parameter of GPT2LMHeadModel."
    )
    assert "Did you mean transformer.h.*.attn.c_attn" in text


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    path = written(tmp_path, "modules:\n  h.x: qkv\n  transformer.drop: mlp_in\n  transformer.h: column\n")
    lines = refused(path).split("\n")
    assert sorted(line.split(": ")[0] for line in lines) == [f"{path}:{n}" for n in (2, 3, 4)]
    assert (
        "transformer.h has no weight of its own to be column. Name what holds one: transformer.h.0"
        in "\n".join(lines)
    )


def test_two_rules_for_one_module_are_refused(tmp_path):
    path = written(
        tmp_path, "modules:\n  transformer.h.*.mlp: replicate\n  transformer.h.1.mlp.c_fc: mlp_in\n"
    )
    old = f"{path}:2 ('transformer.h.*.mlp')"
    assert refused(path) == (
        f"{path}:3: transformer.h.1.mlp.c_fc already has a rule at {old}. Keep one of the two."
    )


@pytest.mark.parametrize(
    "pattern, count",
    [
        ("transformer.h.*.attn.c_attn", 2),
        ("transformer.h.0.attn.c_attn", 1),
        ("**.c_attn", 2),
        ("transformer.**.c_attn", 2),
        ("transformer.h.*.*.c_attn", 2),
        ("transformer.h.*.attn.*_attn", 2),
        (r"re:transformer\.h\.[0-9]+\.attn\.c_attn", 2),
        ("transformer.h.*.attn.c_attn.weight", 2),
        ("transformer.*.c_attn", 0),
        ("transformer.h.attn.c_attn", 0),
        ("c_attn", 0),
        ("re:c_attn", 0),
    ],
)
def test_patterns(pattern, count):
    source = {"modules": {pattern: "qkv"}}
    if count:
        assert len(plan_under(source, "gpt2")[0].claims) == count
    else:
        assert "matches no module or parameter" in refused(source)


# --- transformers' plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama_gqa", "qwen3", "phi3", "glm", "gemma2", "olmo2", "mixtral", "qwen3_moe"]
)
def test_a_tp_plan_is_accepted_as_it_is(name):
    config_class, _, config = TEXT[name]
    tp_plan = getattr(transformers, config_class)(**config).base_model_tp_plan
    assert len(tp_plan) >= 4
    bound, plan = plan_under(tp_plan, name)
    _, automatic = plan_under(None, name)
    assert parameters(plan) == parameters(automatic)
    named = {rule.pattern for claim in bound.claims for rule in [claim.rule]}
    noted = {pattern for pattern in tp_plan if any(f"[{pattern!r}]" in note for note in bound.notes)}
    assert named | noted == set(tp_plan)  # each line is asked for, or told why not


def test_a_models_own_tp_plan_is_accepted():
    model, found = analysed("llama_gqa", 2)
    assert any(name.startswith("model.layers") for name in model.tp_plan)
    bound, _ = plan_under(model.tp_plan, "llama_gqa")
    assert {claim.module for claim in bound.claims} >= {"lm_head", "model.layers.1.mlp.down_proj"}


def test_a_tp_plan_for_another_model_is_refused():
    text = refused({"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"})
    assert "'layers.*.self_attn.q_proj' matches no module or parameter of GPT2LMHeadModel." in text


def test_every_style_of_transformers_is_known():
    from transformers.distributed import expert_parallel
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from autotp.policy_file import ROLES, STYLES

    assert expert_parallel is not None
    assert set(ALL_PARALLEL_STYLES) <= set(STYLES)
    assert {role for role in STYLES.values() if role is not None} <= set(ROLES)


# --- and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpt2", "llama_gqa", "llama_mqa", "falcon_mqa", "bert", "qwen3_moe", "nanogpt"]
)
@pytest.mark.parametrize("source", [None, {"modules": {"re:.*(mlp|intermediate|output)": "replicate"}}])
def test_the_policy_of_a_plan_reproduces_it(tmp_path, name, source):
    if source is not None and name == "bert":
        source = {"modules": {"re:.*layer.*(intermediate|[0-9].output)": "replicate"}}
    _, plan = plan_under(source, name)
    text = to_policy(plan)
    _, again = plan_under(written(tmp_path, text), name)
    assert parameters(again) == parameters(plan)
    _, automatic = plan_under(None, name)
    assert (parameters(plan) == parameters(automatic)) == (source is None)


class Outer(torch.nn.Module):
    """A weight of its own beside a pair of linears; sizes that two ranks split only where they should."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        self.mix = torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return (self.inner(x) @ self.mix).softmax(-1)


def test_a_whole_weight_with_split_modules_beside_it_is_named_itself():
    model, inputs = Outer(), {"x": torch.randn(2, 3)}
    found = analyse(model, 2, inputs)
    plan = to_plan(model, found, 2)
    assert plan.params["mix"].layout is None and plan.params["inner.0.weight"].layout is not None
    text = to_policy(dataclasses.replace(plan, roles=roles(found.index)))
    assert '"mix": replicate' in text and '"inner.0": mlp_in' in text
    bound = load(yaml.safe_load(text)).bind(found.index, 2)
    again = choose(found.index, 2, bound.veto)
    assert again.splits == found.choice.splits


def test_the_policy_of_a_plan_is_short():
    _, plan = plan_under(None, "gpt2")
    lines = to_policy(plan).splitlines()
    assert '  "transformer.h.*.attn.c_attn": qkv' in lines
    assert len(lines) == 4 + 7


def test_no_policy_asks_nothing():
    bound, plan = plan_under(None, "gpt2")
    assert bound.claims == () and bound.notes == ()
    assert plan.sharded_fraction == 1.0


def test_a_block_that_is_the_whole_model_takes_the_roles_of_its_parts():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    plan = autotp.plan(Mlp(), 2, {"up": "mlp_in", "down": "mlp_out"}, example_inputs=(torch.ones(2, 8),))
    assert [plan.params[f"{n}.weight"].placement for n in ("up", "down")] == ["Shard(0)", "Shard(1)"]
    with pytest.raises(PolicyError, match="is head by its dataflow, not attn_out"):
        autotp.plan(Mlp(), 2, {"down": "attn_out"}, example_inputs=(torch.ones(2, 8),))
