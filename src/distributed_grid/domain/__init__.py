"""Domain model: immutable rows, events, and the ledger that indexes them. No clock, no I/O.

Glossary (one word for one thing; deciding belongs in `reactor` and `scheduling`, acting in `control` and `agent`):

=================  ====================================================================================================
node               machine with an agent: capacity, share caps, lending rank, labels, state
usage              measurements of a node; *outside usage* is without that of the grid's own work
observation        last heartbeat of a node with its consequences: idleness, volatility, hold deadline
offer              resources that a node lends now, with an end and a generation; from fresh measurements, not stored
request            who asks for how much, for how long, how urgently, with which constraints
lease              a request and its grant: node, claim, holder, fence, end
claim              exact resources that a lease holds, GPU devices by index
recovered lease    lease read from elsewhere; it counts against its node, and is confirmed by the next heartbeat
fence              number that grows with every grant; whoever acts under an older one is refused
epoch              number of the control plane's start; fences begin above it
hold               how long work on a node runs on without a heartbeat reply
gang               leases on several nodes that are granted and end together
job, attempt       a command, and its runs; each attempt has its own lease and fence and ends once
checkpoint mark    moment up to which an attempt's work would not be lost
victim, preemptor  lease that is stopped to make room, and the lease that gets the room
quota, share       most that a user or team holds at once; part of the grid that a user is entitled to
account            decayed usage and last run times of a user
request shape      resources of a request that decide where it fits; counted to weigh fragmentation
reservation        nodes kept for a waiting request from a moment on; others may backfill
pressure           how hard a node works, 0 to 1000; above its high watermark it borrows, below the low one it returns
automatic lease    lease that the grid itself holds for a node under pressure
boost              lease that somebody asked for on behalf of a node
advice             recommendation to move work to another node
engine, binding    other scheduler on a node (Ray), and its reservation (placement group) for a lease
block, copy        bytes in the memory of other nodes, and one replica of them; a copy is held by a lease
worker             machine that a provider starts for the grid, from the intent until it is proven gone
clock jump         difference by which a wall clock moved other than the boot clock; pending until it is confirmed
age                time that deletions compare with; passes with the boot clock, whatever the wall clock does
event, follow-up   fact (`LeaseLost`); command of a decider for the same step or a later one (`ScanQueue`)
effect             work outside the ledger (`StopAttempt`), derived from rows
ledger             all living rows with their indexes; `apply` is the only writer
=================  ====================================================================================================
"""
