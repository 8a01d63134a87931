"""The episode: a task is played by talking to an inference engine and an environment, token in and token out.

``episode.py`` is the loop, whatever the policy is talked to by. ``token_conversation.py`` renders a conversation once,
piece by piece, in the model's chat format (``models/chat``), asks an ``Engine`` for token ids, and puts every id that
the policy saw or sampled into one growing sequence (``builder.py``): sampled ids are never decoded and encoded again,
so what is trained on is exactly what was sampled. ``chat_conversation.py`` talks to an OpenAI-compatible endpoint
instead, for evaluations. What comes out is a ``Trajectory``: ids, action mask, behaviour log-probs, weight versions,
reward or *unknown*, and the ``Outcome``. Nothing here imports torch or vLLM.

``prompts.yaml`` holds what the policy is told, ``local_tools.py`` the tools that the agent answers itself: the final
answer as a call, pages of long results (``outputs.py``), context management. Where the prompt is not the last one with
something appended, because turns were removed or the thinking of earlier turns is left out (``history.py``), a new
*segment* of the trajectory begins, which training takes as a row of its own.
"""
