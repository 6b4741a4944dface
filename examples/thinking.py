# SPDX-License-Identifier: Apache-2.0
"""Ask a question: the model's reasoning comes apart from its answer, or not at all.

python examples/thinking.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is 17 + 25?"}]

completion = client.chat.completions.create(model=model, messages=messages)
message = completion.choices[0].message
print("Reasoning:", message.reasoning)
print("Answer:", message.content)

completion = client.chat.completions.create(
    model=model,
    messages=messages,
    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
)
print("At once:", completion.choices[0].message.content)
