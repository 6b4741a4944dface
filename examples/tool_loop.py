# SPDX-License-Identifier: Apache-2.0
"""Let the model call a tool, streamed, and send the result back together with its reasoning.

python examples/tool_loop.py [http://localhost:8000/v1]
"""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "get weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str, days: int = 1) -> str:
    print(f"Calling get_weather({city!r}, {days})")
    return "dry, 24 C"


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Rain in Faro?"}]

finish_reason = "tool_calls"
while finish_reason == "tool_calls":  # a call that was cut has "length", and must not be run
    answer = {"role": "assistant", "reasoning": "", "content": ""}
    calls = []
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, stream=True
    )
    for chunk in stream:
        choice = chunk.choices[0]
        finish_reason = choice.finish_reason
        answer["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        answer["content"] += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.id:  # the first piece of a call
                function = {"name": piece.function.name, "arguments": ""}
                calls.append({"id": piece.id, "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += piece.function.arguments or ""
    print("Reasoning:", answer["reasoning"])

    messages.append(answer | {"tool_calls": calls} if calls else answer)
    if finish_reason == "tool_calls":
        for call in calls:
            result = get_weather(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

print("Answer:", messages[-1]["content"])
