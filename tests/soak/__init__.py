"""A soak: random jobs, random input, random faults, for as long as one likes; every job is decided by seed and number.

A *cycle* is what happens between two looks at a job: a run that something happens to, or nothing, or several runs that
get in each other's way. After each of them the state must be one that a reader may see; after an undisturbed one
everything must be there once, and nothing be left.

=============  ====================================================================================
module         what it holds
=============  ====================================================================================
``plan``       what a job lives through, as plain values and in words
``invention``  jobs and faults from a seed
``input``      random files that grow
``files``      what is in the files: an independent reader of them
``truth``      what must come of that: every operation in plain Python
``stage``      server, databases and runs of one worker
``player``     has a plan happen
``oracle``     what must hold after each cycle
``watch``      what must hold all the time
``worker``     a process that plays one job after the other
``__main__``   the command
=============  ====================================================================================
"""
