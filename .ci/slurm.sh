# shellcheck shell=bash
# Debian's Slurm of one host, for scripts that source this: its daemons are started by hand, on ports and in a folder of
# their own. Needs root; what is missing is installed.
#
#     slurm FOLDER     a folder that daemons without root may read, its path short enough for a socket; then srun works
#     end_slurm        ends the daemons
slurm_daemons=()

end_slurm() {
    for pid in "${slurm_daemons[@]}"; do kill "$pid" 2>/dev/null || true; done
    [ ${#slurm_daemons[@]} = 0 ] || wait "${slurm_daemons[@]}" || true
    slurm_daemons=()
}

slurm() {
    local folder=$1 host packages=()
    command -v srun >/dev/null || packages+=(slurm-client)
    command -v slurmctld >/dev/null || packages+=(slurmctld)
    command -v slurmd >/dev/null || packages+=(slurmd)
    command -v munged >/dev/null || packages+=(munge)
    if [ ${#packages[@]} -gt 0 ]; then
        apt-get update -q >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
    fi
    host=$(hostname -s)
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" \
        >"$folder/munged.out" 2>&1 &
    slurm_daemons+=($!)
    mkdir -p "$folder/state" "$folder/spool"
    cat >"$folder/slurm.conf" <<END
ClusterName=quintet
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmctldPort=36817
SlurmdPort=36818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
MpiDefault=none
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
END
    export SLURM_CONF=$folder/slurm.conf
    slurmctld -D -i >"$folder/slurmctld.out" 2>&1 &
    slurm_daemons+=($!)
    slurmd -D >"$folder/slurmd.out" 2>&1 &
    slurm_daemons+=($!)
    for _ in $(seq 300); do
        [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && return
        sleep 0.1
    done
    echo "slurm did not come up"
    return 1
}
