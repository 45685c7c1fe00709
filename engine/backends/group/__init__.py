"""A group of rank processes behind one object: started, watched and started again by the engine's process.

It knows no trainer: `group.Group` takes the dotted path of a class, which every rank builds once. Only `rank` imports
torch. The engine spawns the ranks of its own machine; on every other one `ostinato engine join` does, which any
launcher of one process per machine may start and keep up. For two machines, one of:

    srun --nodes 1 --ntasks-per-node 1 ostinato engine join --head HOST:PORT --node-rank 1
    torchrun --nnodes 1 --nproc-per-node 1 --max-restarts 1000 --no-python \\
        ostinato engine join --head HOST:PORT --node-rank 1
"""
