"""The nouns of the grid and their laws: pure values, no clock, no I/O.

Glossary (one word a thing):

- node: a machine with an agent; has capacity, share caps, a lending rank, labels, a life.
- usage: what is measured; *outside usage* is measured minus what the grid's own work uses.
- offer: what a node will lend now, until when, with a generation.
- request: who asks for how much, for how long, how urgent, where preferably.
- lease: a granted request: node, claim, holder, fence, end.
- claim: the exact resources a lease holds, GPU devices by index.
- job, attempt: a command; its runs, each with its own lease and fence, each ending once.
- level, mark: how much of a resource a node uses; above its high mark it gets more, below its low mark that goes back.
- automatic lease: what the grid itself borrowed for a node; advice: work that should move, and where to.
- ledger: everything that is alive; `apply` is its only writer.

Deciding what to do with these belongs in `reactor` and `scheduling`; doing it in `adapters` and `agent`.
"""
