import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import ModelConfigDict, TritonContext, batch, get_model_config, get_triton_context, sample
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TritonModelConfig


class Twin:
    """All objects of this class print alike."""

    def __repr__(self) -> str:
        return "Twin"

    def __call__(self, requests: Any) -> Any:
        return requests

    @batch
    def infer(self, a: Any, b: Any) -> Any:
        return [a + b, a - b]

    @classmethod
    def shared(cls, requests: Any) -> Any:
        return requests


def config(name: str) -> TritonModelConfig:
    return TritonModelConfig(name)


class TestModelConfigDict:
    def test_functions(self) -> None:
        configs = ModelConfigDict()
        one, other = (lambda requests: requests), (lambda requests: requests)
        configs[one] = config("one")
        configs[other] = config("other")
        assert (configs[one].model_name, configs[other].model_name) == ("one", "other")
        assert list(configs) == [one, other]
        assert len(configs) == 2

    def test_objects_of_equal_repr_are_told_apart(self) -> None:
        configs = ModelConfigDict()
        one, other = Twin(), Twin()
        configs[one] = config("one")
        configs[other] = config("other")
        configs[one.infer] = config("one.infer")
        configs[other.infer] = config("other.infer")
        assert configs[one].model_name == "one"
        assert configs[other].model_name == "other"
        assert configs[one.infer].model_name == "one.infer"
        assert configs[other.infer].model_name == "other.infer"

    def test_an_object_and_its_call_are_one(self) -> None:
        configs = ModelConfigDict()
        twin = Twin()
        configs[twin.__call__] = config("called")
        assert configs[twin].model_name == "called"
        configs[twin] = config("object")
        assert configs[twin.__call__].model_name == "object"
        assert len(configs) == 1

    def test_decorators_make_no_difference(self) -> None:
        def infer(a: Any) -> Any:
            return {"a": a}

        configs = ModelConfigDict()
        configs[batch(infer)] = config("infer")
        assert configs[infer].model_name == "infer"
        assert configs[sample(infer)].model_name == "infer"
        assert configs[batch(sample(infer))].model_name == "infer"

    def test_class_methods_of_a_class_and_of_its_object(self) -> None:
        configs = ModelConfigDict()
        configs[Twin.shared] = config("shared")
        assert configs[Twin().shared].model_name == "shared"

    def test_unhashable_callables(self) -> None:
        class Unhashable:
            __hash__ = None  # type: ignore[assignment]

            def __call__(self, requests: Any) -> Any:
                return requests

        configs = ModelConfigDict()
        func = Unhashable()
        configs[func] = config("unhashable")
        assert configs[func].model_name == "unhashable"

    def test_objects_that_are_equal_are_told_apart(self) -> None:
        class Equal:
            def __eq__(self, other: object) -> bool:
                return isinstance(other, Equal)

            def __hash__(self) -> int:
                return 1

            def __call__(self, requests: Any) -> Any:
                return requests

            def infer(self, requests: Any) -> Any:
                return requests

        configs = ModelConfigDict()
        one, other = Equal(), Equal()
        for func, name in ((one, "one"), (other, "other"), (one.infer, "one.infer"), (other.infer, "other.infer")):
            configs[func] = config(name)
        found = [configs[func].model_name for func in (one, other, one.infer, other.infer)]
        assert found == ["one", "other", "one.infer", "other.infer"]
        assert len(configs) == 4
        del configs[one]
        assert one not in configs
        assert configs[other].model_name == "other"

    def test_partials_of_one_function_are_told_apart(self) -> None:
        configs = ModelConfigDict()
        one, other = functools.partial(print, 1), functools.partial(print, 1)
        configs[one], configs[other] = config("one"), config("other")
        assert (configs[one].model_name, configs[other].model_name) == ("one", "other")

    def test_equality(self) -> None:
        one, other = ModelConfigDict(), ModelConfigDict()
        assert one == other
        one[print] = config("a")
        assert one != other
        other[print] = config("a")
        assert one == other
        assert TritonContext(one) == TritonContext(other)
        other[print] = config("b")
        assert one != other
        assert one != {print: config("a")}
        assert ModelConfigDict(base=one) == one

    def test_copies_find_their_own_callables(self) -> None:
        twin = Twin()
        configs = ModelConfigDict(base=ModelConfigDict())
        configs[twin] = config("twin")
        configs[print] = config("print")
        shallow = copy.copy(configs)
        shallow[len] = config("len")
        assert len not in configs
        assert shallow[twin].model_name == "twin"
        found_twin, found = copy.deepcopy((twin, configs))
        assert found[found_twin].model_name == "twin"
        assert twin not in found
        loaded = pickle.loads(pickle.dumps(TritonContext(ModelConfigDict(configs))))
        assert loaded.model_configs[print].model_name == "print"
        assert [type(func).__name__ for func in loaded.model_configs] == ["Twin", "builtin_function_or_method"]

    def test_it_shows_its_entries(self) -> None:
        configs = ModelConfigDict()
        configs[print] = config("a")
        assert repr(configs).startswith("ModelConfigDict({<built-in function print>: TritonModelConfig(model_name='a'")

    def test_missing_and_deleted(self) -> None:
        configs = ModelConfigDict()
        with pytest.raises(KeyError):
            configs[print]
        with pytest.raises(KeyError):
            del configs[print]
        configs[print] = config("print")
        assert print in configs
        del configs[print]
        assert print not in configs

    def test_a_base_is_looked_up_last_and_never_written(self) -> None:
        base = ModelConfigDict()
        configs = ModelConfigDict(base)
        base[print] = config("base")
        base[len] = config("len")
        configs[print] = config("own")
        assert (configs[print].model_name, configs[len].model_name) == ("own", "len")
        assert base[print].model_name == "base"
        assert len(configs) == 2


class TestAttribute:
    """The attribute `__triton_context__`, as unit tests of inference callables set it."""

    def test_on_a_decorated_function(self, make_requests: Callable[..., Any], model_config: TritonModelConfig) -> None:
        infer: Any = batch(lambda a, b: [a + b, a - b])
        context = TritonContext()
        context.model_configs[infer] = model_config
        infer.__triton_context__ = context
        assert sorted(infer(make_requests(1, 1))[0]) == ["difference", "total"]
        assert get_triton_context(infer) is context
        assert get_model_config(infer) is model_config

    def test_on_the_object_of_a_method(
        self, make_requests: Callable[..., Any], model_config: TritonModelConfig
    ) -> None:
        twin: Any = Twin()
        twin.__triton_context__ = TritonContext()
        twin.__triton_context__.model_configs[twin.infer] = model_config
        assert sorted(twin.infer(make_requests(1, 1))[0]) == ["difference", "total"]
        assert sorted(Twin.infer(twin, make_requests(1, 1))[0]) == ["difference", "total"]  # type: ignore[call-arg]
        assert get_model_config(twin.infer, twin) is model_config
        with pytest.raises(PyTritonValidationError, match="not bound"):
            Twin().infer(make_requests(1))

    def test_on_the_class_of_a_class_method(
        self, make_requests: Callable[..., Any], model_config: TritonModelConfig
    ) -> None:
        class Below:
            @batch
            @classmethod
            def infer(cls, a: Any, b: Any) -> Any:
                return [a + b, a - b]

        class Above:
            @classmethod
            @batch
            def infer(cls, a: Any, b: Any) -> Any:
                return [a + b, a - b]

        for model in (Below, Above):
            place: Any = model
            place.__triton_context__ = TritonContext()
            place.__triton_context__.model_configs[place.infer] = model_config
            assert sorted(place.infer(make_requests(1, 1))[0]) == ["difference", "total"]
            assert sorted(place().infer(make_requests(1, 1))[0]) == ["difference", "total"]

    def test_on_a_decorated_object(self, make_requests: Callable[..., Any], model_config: TritonModelConfig) -> None:
        class Adder:
            def __call__(self, a: Any, b: Any) -> Any:
                return [a + b, a - b]

        adder: Any = Adder()
        adder.__triton_context__ = TritonContext()
        adder.__triton_context__.model_configs[adder] = model_config
        for decorated in (batch(adder), batch(adder.__call__)):
            assert sorted(decorated(make_requests(1))[0]) == ["difference", "total"]

    def test_on_the_function_of_a_partial(
        self, make_requests: Callable[..., Any], model_config: TritonModelConfig
    ) -> None:
        def infer(factor: int, a: Any, b: Any) -> Any:
            return [factor * a, b]

        function: Any = infer
        function.__triton_context__ = TritonContext()
        function.__triton_context__.model_configs[infer] = model_config
        results = batch(functools.partial(infer, 3))(make_requests(1, 1))
        assert [result["total"].item() for result in results] == [0, 3]


class TestNotBound:
    def test_the_error_says_where_it_was_looked_for(self, make_requests: Callable[..., Any]) -> None:
        def my_infer(a: Any, b: Any) -> Any:
            return [a]

        with pytest.raises(PyTritonValidationError, match=r"my_infer.*not bound.*Triton\.bind.*__triton_context__"):
            batch(my_infer)(make_requests(1))

    def test_a_context_without_an_entry(self) -> None:
        def infer(a: Any) -> Any:
            return [a]

        infer.__triton_context__ = TritonContext()  # type: ignore[attr-defined]
        with pytest.raises(PyTritonValidationError, match="model_configs has an entry"):
            batch(infer)([{"a": np.zeros((1, 1))}])

    def test_names_are_not_needed_for_dictionaries(self) -> None:
        assert batch(lambda a: {"a": a})([{"a": np.zeros((1, 1))}])[0]["a"].shape == (1, 1)
