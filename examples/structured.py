# SPDX-License-Identifier: Apache-2.0
"""Have the model think first, and then answer in JSON of a given schema.

python examples/structured.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI
from pydantic import BaseModel


class Price(BaseModel):
    cents: int


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")

completion = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": "A bat and a ball cost 110 cents, the bat 100 more. The ball?",
        }
    ],
    response_format=Price,
)
message = completion.choices[0].message
print("Reasoning:", message.reasoning)
print("Cents:", message.parsed.cents)
