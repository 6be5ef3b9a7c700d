"""Faults at every step of the protocol: real processes, real signals, a real server.

A *case* runs one job in a process of its own and does something to it at the n-th occurrence of a step. Steps are the
events that the engine emits for its telemetry; nothing in the product knows of these tests.

=============  ====================================================================================
module         what it holds
=============  ====================================================================================
``steps``      the list of steps of each job: a step that is seen and not listed fails the suite
``jobs``       the jobs, their input and what must come of it
``fault``      what can be done to a run at a step, and the request that describes a run
``child``      the body of a run's process
``zygote``     a warm process that forks these processes
``arena``      databases, input files and runs of one test worker
``described``  jobs as plain data, for whoever makes them up
``crashing``   a server to be killed
``refusals``   triggers by which a server raises any error
``oracle``     what must hold after a fault, after a repeated run, and after an idle one
``reader``     a concurrent reader, and what it may never see
``proxy``      a TCP proxy that loses answers
``wire``       the same as a network that falls silent, stalls, is slow or refuses
=============  ====================================================================================
"""
