"""Episodes: a task is played by talking to an inference engine and an environment, token in, token out.

``episode.py`` is the loop, independent of how the policy is reached. ``token_conversation.py`` renders a conversation
once, piece by piece, in the model's chat format (``models/chat``), asks an ``Engine`` for token ids, and appends every
id that the policy saw or sampled to one growing sequence (``builder.py``): sampled ids are never decoded and
re-encoded, so training sees exactly what was sampled. ``chat_conversation.py`` talks to an OpenAI-compatible endpoint
instead, for evaluations. The result is a ``Trajectory``: ids, action mask, behaviour log-probs, weight versions, reward
or *unknown*, and the ``Outcome``. Nothing here imports torch or vLLM.

``prompts.yaml`` holds the texts shown to the policy, ``local_tools.py`` the tools that the agent answers itself: the
final answer as a call, pages of long results, context management. When a prompt does not extend the
previous one, because turns were removed or the thinking of earlier turns is omitted (``history.py``), a new *segment*
of the trajectory begins, which training treats as a separate sequence.
"""
