#!/bin/sh
# A command agent of the fleet: agent.sh KIND; its input is "STEPS ENDING" (see agents.py).
# command: a plain one. deaf: does not hear SIGTERM. family: leaves a grandchild behind, in a session of its own, that
# does not hear SIGTERM either, holds the output open, and writes to the ledger for as long as it lives.
kind=$1
note() {
    read -r up rest </proc/uptime
    echo "$up $ORCHESTRATOR_TASK_ID $ORCHESTRATOR_ATTEMPT $1 $$ $kind" >>"$CHAOS_LEDGER"
}
if [ "$kind" = grandchild ]; then
    trap '' TERM HUP
    while :; do
        note beat
        sleep 0.2
    done
fi
note begin
[ "$kind" = deaf ] && trap '' TERM
[ "$kind" = family ] && setsid sh "$0" grandchild &
read -r steps ending
[ "$ending" = later ] && { [ $((ORCHESTRATOR_ATTEMPT % 2)) = 1 ] && ending=transient || ending=done; }
while [ "$steps" -gt 0 ]; do
    sleep 0.2
    note beat
    steps=$((steps - 1))
done
case $ending in
    done)
        note end
        echo "$ORCHESTRATOR_TASK_ID.$ORCHESTRATOR_ATTEMPT"
        ;;
    permanent)
        note fail
        exit 77
        ;;
    *)
        note fail
        exit 75
        ;;
esac
