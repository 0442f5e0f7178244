"""`save_hyperparameters` and the files of hyper-parameters, against the recorded behaviour of Lightning."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from enum import Enum
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest
from support.golden import read

import jaxlightning as pl
from jaxlightning.utilities.hparams import (
    HyperparametersMixin,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_yaml,
)
from jaxlightning.utilities.parsing import AttributeDict, given_hyperparameters

GOLDEN = read("hparams")


class Everything(pl.LightningModule):
    def __init__(self, a, b=2, *args, c="x", **kw):
        super().__init__()
        self.save_hyperparameters()


class Reassigning(pl.LightningModule):
    def __init__(self, a, b=2):
        super().__init__()
        local = 3  # noqa: F841
        a = a + 100
        self.save_hyperparameters(ignore=["b"])


class Sub(Reassigning):
    def __init__(self, z=9, **k):
        super().__init__(**k)


class OneArgument(pl.LightningModule):
    def __init__(self, conf):
        super().__init__()
        self.save_hyperparameters(conf)


class Selecting(pl.LightningModule):
    def __init__(self, a=1, b=2):
        super().__init__()
        self.save_hyperparameters("a")


@pytest.mark.catalogue("HP01")
def test_all_arguments_are_saved_with_kwargs_merged_and_args_dropped():
    module = Everything(1, c="y", extra=5)
    assert dict(module.hparams) == GOLDEN["auto"]
    assert module._hparams_name == GOLDEN["name"]
    assert dict(Everything(1, 3, 4, 5).hparams) == {"a": 1, "b": 3, "c": "x"}


@pytest.mark.catalogue("HP01")
def test_the_values_are_those_at_the_time_of_the_call_and_locals_are_left_out():
    assert dict(Reassigning(1).hparams) == GOLDEN["reassigned_before_save"]


@pytest.mark.catalogue("HP01")
def test_arguments_are_collected_through_the_class_hierarchy():
    # The base class gets `a` through the derived class's **k, and the derived class's value of it wins.
    assert dict(Sub(a=1).hparams) == GOLDEN["subclass"]


@pytest.mark.catalogue("HP02")
def test_one_mapping_or_namespace_is_saved_under_the_name_of_its_argument():
    from_dict = OneArgument({"x": 1})
    assert [dict(from_dict.hparams), from_dict._hparams_name] == GOLDEN["dict_arg"]
    named = OneArgument(argparse.Namespace(x=1))
    assert [dict(named.hparams), named._hparams_name, named.hparams.x] == GOLDEN["namespace_arg"]


@pytest.mark.catalogue("HP03")
def test_names_select_and_the_initial_values_cannot_be_changed():
    module = Selecting()
    assert dict(module.hparams) == GOLDEN["select"]
    module.hparams.a = 50
    assert [module.hparams.a, module.hparams_initial.a] == GOLDEN["initial_frozen"]
    module.hparams_initial.a = 7
    assert module.hparams_initial.a == GOLDEN["initial_after_write"]


def test_a_network_among_the_arguments_is_warned_about():
    with pytest.warns(UserWarning, match="Attribute 'a' is a network"):
        Everything(nn.Dense(3))


def test_large_arrays_among_the_arguments_are_warned_about():
    with pytest.warns(UserWarning, match="Attribute 'a' holds large arrays"):
        Everything({"x": np.zeros(5000)})
    assert Everything(np.zeros(3)).hparams.a.shape == (3,)


@pytest.mark.parametrize("value", [1, 2.0, True, "x"])
def test_a_single_primitive_is_refused(value):
    module = pl.LightningModule()
    with pytest.raises(ValueError, match=r"Primitives .* are not allowed"):
        module._set_hparams(value)


def test_an_object_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="Unsupported config type"):
        OneArgument([1, 2])


def test_a_name_that_is_no_argument_is_an_error_that_lists_the_arguments():
    class Wrong(pl.LightningModule):
        def __init__(self, a=1):
            super().__init__()
            self.save_hyperparameters("b", "a")

    with pytest.raises(KeyError, match="does not have"):
        Wrong()


def test_an_empty_container_saves_nothing():
    assert dict(OneArgument({}).hparams) == {}


def test_ignoring_in_a_derived_class_removes_what_the_base_class_saved():
    class Base(pl.LightningModule):
        def __init__(self, a=1, b=2):
            super().__init__()
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, a=1, b=2, c=3):
            super().__init__(a, b)
            self.save_hyperparameters(ignore="b")

    assert dict(Derived().hparams) == {"a": 1, "c": 3}


def test_an_object_built_inside_another_takes_nothing_from_it():
    class Child(pl.LightningModule):
        def __init__(self, same="child"):
            super().__init__()
            self.save_hyperparameters()

    class Parent(pl.LightningModule):
        def __init__(self, same="parent", other="other"):
            super().__init__()
            self.save_hyperparameters()
            self.child = Child(same="given")

    class Plain:
        def __init__(self, same="plain", more=1):
            self.child = Child(same="given")

    assert dict(Parent().child.hparams) == {"same": "given"}
    assert dict(Parent().hparams) == {"same": "parent", "other": "other"}
    assert dict(Plain().child.hparams) == {"same": "given"}


def test_a_dataclass_saves_its_init_fields():
    @dataclasses.dataclass(eq=False)
    class Net(pl.LightningModule):
        mandatory: int
        optional: str = "x"
        hidden: str = dataclasses.field(default="y", init=False)

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    assert dict(Net(33).hparams) == {"mandatory": 33, "optional": "x"}


def test_a_decorated_constructor_and_one_without_super_are_understood():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Decorated(pl.LightningModule):
        @decorate
        def __init__(self, a, b=2):
            super().__init__()
            self.save_hyperparameters()

    class Explicit(pl.LightningModule):
        def __init__(self, a, b=2):
            pl.LightningModule.__init__(self)
            self.save_hyperparameters()

    assert dict(Decorated(1).hparams) == {"a": 1, "b": 2}
    assert dict(Explicit(1).hparams) == {"a": 1, "b": 2}


def test_a_helper_may_pass_the_frame_of_the_constructor():
    import inspect

    class Helped(pl.LightningModule):
        def __init__(self, a):
            super().__init__()
            self._helper(inspect.currentframe())

        def _helper(self, frame):
            self.save_hyperparameters(frame=frame)

    assert dict(Helped(4).hparams) == {"a": 4}


def test_given_arguments_win_over_the_frames():
    with given_hyperparameters({"a": 10, "sub": {"x": 1}}):
        assert dict(Everything(1).hparams) == {"a": 10, "sub": {"x": 1}}


def test_any_class_may_mix_it_in():
    class Config(HyperparametersMixin):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters(logger=False)

    assert Config(lr=1.0).hparams == {"lr": 1.0}
    assert Config()._log_hyperparams is False


def test_an_attribute_dict_reads_and_writes_as_attributes_and_says_what_there_is():
    values = AttributeDict(a=1)
    values.b = 2
    assert (values["b"], values.a) == (2, 1)
    del values.a
    with pytest.raises(AttributeError, match=r"Missing attribute 'a'. Available: \['b'\]"):
        _ = values.a
    assert repr(AttributeDict(k=1, longer="x")) == '"k":      1\n"longer": x'


# --- files ------------------------------------------------------------------------------------------------------


class Color(Enum):
    RED = 1


def test_yaml_keeps_plain_data_and_leaves_out_the_rest_with_a_warning(tmp_path):
    file = tmp_path / "hparams.yaml"
    hparams = {"lr": 0.1, "sizes": (1, 2), "color": Color.RED, "path": Path("a"), "scalar": np.float32(0.5), "f": len}
    with pytest.warns(UserWarning, match="Skipping 'f' parameter"):
        save_hparams_to_yaml(file, hparams)
    want = {"lr": 0.1, "sizes": [1, 2], "color": "RED", "path": "a", "scalar": 0.5}
    assert load_hparams_from_yaml(file) == want


def test_yaml_needs_its_folder_and_a_mapping(tmp_path):
    with pytest.raises(RuntimeError, match="Missing folder"):
        save_hparams_to_yaml(tmp_path / "no" / "h.yaml", {})
    with pytest.raises(TypeError, match="must be a dictionary"):
        save_hparams_to_yaml(tmp_path / "h.yaml", [1])  # type: ignore[arg-type]


def test_yaml_tags_that_would_build_objects_are_refused(tmp_path):
    file = tmp_path / "evil.yaml"
    file.write_text("a: !!python/object/apply:os.system ['touch pwned']\n")
    with pytest.raises(ValueError, match="not plain YAML"):
        load_hparams_from_yaml(file)
    assert not Path("pwned").exists()
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        load_hparams_from_yaml(file)


def test_missing_files_are_warned_about(tmp_path):
    with pytest.warns(RuntimeWarning, match="Missing Tags"):
        assert load_hparams_from_yaml(tmp_path / "no.yaml") == {}
    with pytest.warns(RuntimeWarning, match="Missing Tags"):
        assert load_hparams_from_tags_csv(tmp_path / "no.csv") == {}


def test_csv_holds_literals(tmp_path):
    file = tmp_path / "tags.csv"
    file.write_text("key,value\nlr,0.1\nname,abc\nflag,True\n")
    found: dict[str, Any] = load_hparams_from_tags_csv(file)
    assert found == {"lr": 0.1, "name": "abc", "flag": True}
