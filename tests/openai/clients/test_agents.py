"""Programs that people build agents with, against the endpoints and a model that answers by rule.

Their packages are many: `hatch run clients:test` runs these tests in an environment that has them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

from pydantic import BaseModel

from openai import OpenAI
from pytriton.decorators import Shape, model
from pytriton.triton import Triton
from support.language.clerk import clerk
from support.language.endpoints import Served
from support.serving import local_config, running

# What these packages warn of within themselves is nothing that could be mended here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the packages from files of the user, and from a list of prices that they would ask the Internet for."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: Its name.
    """
    return f"4 degrees in {city}"


@model(max_batch_size=8)
def length(text: str) -> Annotated[NDArray[np.float32], Shape(1)]:
    return np.array([len(text)], np.float32)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    triton = Triton(config=local_config())
    triton.bind(clerk)
    triton.bind(length)
    with running(triton), Served(triton) as served:
        yield f"{served.url}/v1"


def test_openai(url: str) -> None:
    with OpenAI(base_url=url, api_key="none") as client:
        ask: Any = [{"role": "user", "content": "How is Oslo?"}]
        parsed = client.chat.completions.parse(model="clerk", messages=ask, response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(city="Oslo", degrees=4)
        response = client.responses.parse(model="clerk", input="How is Oslo?", text_format=Weather)
        assert response.output_parsed == Weather(city="Oslo", degrees=4)


@pytest.mark.parametrize("is_response", [False, True])
def test_langchain(url: str, is_response: bool) -> None:
    openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = openai.ChatOpenAI(base_url=url, api_key="none", model="clerk", use_responses_api=is_response)
    bound = model.bind_tools([weather])
    said: list[Any] = [messages.HumanMessage("How is Oslo?")]
    answer = bound.invoke(said)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    said += [answer, messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    last = bound.invoke(said)
    assert last.text.strip() == "It says 4 degrees in Oslo."
    assert last.usage_metadata["output_tokens"] == 5
    streamed = list(bound.stream(said))
    assert "".join(chunk.text for chunk in streamed).strip() == "It says 4 degrees in Oslo."
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    for method in ("json_schema", "function_calling"):
        form = model.with_structured_output(Weather, method=method)
        assert form.invoke("How is Oslo?") == Weather(city="Oslo", degrees=4)


def test_langchain_embeddings(url: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    asked = openai.OpenAIEmbeddings(base_url=url, api_key="none", model="length", check_embedding_ctx_length=False)
    assert asked.embed_documents(["a", "bcd"]) == [[1.0], [3.0]]


def test_pydantic_ai(url: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind("clerk", provider=provider)
        agent: Any = ai.Agent(model, tools=[weather])
        assert agent.run_sync("How is Oslo?").output.strip() == "It says 4 degrees in Oslo."
        for output in (Weather, ai.NativeOutput(Weather)):
            result = ai.Agent(model, output_type=output).run_sync("How is Oslo?")
            assert result.output == Weather(city="Oslo", degrees=4)
            # A method before release 2.40, which works as one with a warning since.
            assert (result.usage() if callable(result.usage) else result.usage).output_tokens == 5


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    with OpenAI(base_url=url, api_key="none") as client:
        asking = instructor.from_openai(client, mode=instructor.Mode[mode])
        ask = [{"role": "user", "content": "How is Oslo?"}]
        found = asking.chat.completions.create(model="clerk", messages=ask, response_model=Weather)
        assert found.model_dump() == {"city": "Oslo", "degrees": 4}


def test_smolagents(url: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel("clerk", api_base=url, api_key="none")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(weather)], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("How is Oslo?") == "4 degrees in Oslo"


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": "openai/clerk", "api_base": url, "api_key": "none",
        "messages": [{"role": "user", "content": "How is Oslo?"}],
    }  # fmt: skip
    assert litellm.completion(**asked).choices[0].message.content.strip() == "It says How is Oslo?."
    parts = list(litellm.completion(**asked, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts).strip() == "It says How is Oslo?."
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    [call] = litellm.completion(**asked, tools=tools).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')


def test_openai_agents(url: str) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def ask() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
                model = kind(model="clerk", openai_client=client)
                agent = agents.Agent(name="clerk", tools=[agents.function_tool(weather)], model=model)
                found = await agents.Runner.run(agent, "How is Oslo?")
                assert found.final_output.strip() == "It says 4 degrees in Oslo."
                form = agents.Agent(name="clerk", model=model, output_type=Weather)
                found = await agents.Runner.run(form, "How is Oslo?")
                assert found.final_output == Weather(city="Oslo", degrees=4)

    asyncio.run(ask())


def test_langchain_agent(url: str) -> None:
    create_agent = pytest.importorskip("langchain.agents").create_agent
    openai = pytest.importorskip("langchain_openai")
    agent = create_agent(openai.ChatOpenAI(base_url=url, api_key="none", model="clerk"), tools=[weather])
    said = agent.invoke({"messages": [{"role": "user", "content": "How is Oslo?"}]})["messages"]
    assert [message.type for message in said] == ["human", "ai", "tool", "ai"]
    assert said[-1].text.strip() == "It says 4 degrees in Oslo."


def test_llama_index(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.tools")
    llm = like.OpenAILike(
        model="clerk", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True
    )
    assert llm.complete("How is Oslo?").text.strip() == "It says How is Oslo?."
    assert "".join(part.delta or "" for part in llm.stream_complete("How is Oslo?")).strip() == "It says How is Oslo?."
    assert llm.as_structured_llm(Weather).complete("How is Oslo?").raw == Weather(city="Oslo", degrees=4)
    asked = llm.chat_with_tools([core.FunctionTool.from_defaults(weather)], user_msg="How is Oslo?")
    [call] = llm.get_tool_calls_from_response(asked)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})


def test_haystack(url: str) -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    classes = pytest.importorskip("haystack.dataclasses")
    tools = pytest.importorskip("haystack.tools")
    secret = pytest.importorskip("haystack.utils").Secret.from_token("none")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = tools.Tool(name="weather", description="The weather.", parameters=parameters, function=weather)
    generator = chat.OpenAIChatGenerator(api_key=secret, model="clerk", api_base_url=url, tools=[tool])
    said = [classes.ChatMessage.from_user("How is Oslo?")]
    [answer] = generator.run(said)["replies"]
    [call] = answer.tool_calls
    assert (call.tool_name, call.arguments) == ("weather", {"city": "Oslo"})
    said += [answer, classes.ChatMessage.from_tool(weather(**call.arguments), origin=call)]
    [last] = generator.run(said)["replies"]
    assert last.text.strip() == "It says 4 degrees in Oslo."


def test_dspy(url: str) -> None:
    dspy: Any = pytest.importorskip("dspy")
    base: Any = dspy.LM

    class Clerk(base):  # type: ignore[misc] # of another environment
        # dspy takes from a list of known models what a model can do, and this one is not in it.
        supports_response_schema = True
        supported_params = frozenset({"response_format"})

    lm = Clerk("openai/clerk", api_base=url, api_key="none", cache=False)
    assert [text.strip() for text in lm("How is Oslo?")] == ["It says How is Oslo?."]
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict("question -> city: str, degrees: int")(question="How is Oslo?")
    assert (found.city, found.degrees) == ("Oslo", 4)


def test_llm(url: str, tmp_path: Path) -> None:
    llm = pytest.importorskip("llm")
    listed = {
        "model_id": "clerk", "model_name": "clerk", "api_base": url, "supports_tools": True, "supports_schema": True
    }  # fmt: skip
    # JSON is YAML as well.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([listed]), encoding="utf-8")
    model = llm.get_model("clerk")
    assert model.prompt("How is Oslo?", stream=False).text().strip() == "It says How is Oslo?."
    assert "".join(model.prompt("How is Oslo?")).strip() == "It says How is Oslo?."
    assert json.loads(model.prompt("How is Oslo?", schema=Weather).text()) == {"city": "Oslo", "degrees": 4}
    assert model.chain("How is Oslo?", tools=[weather]).text().strip() == "It says 4 degrees in Oslo."
