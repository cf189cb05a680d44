set -euo pipefail

POLL_SECONDS=${POLL_SECONDS:-30}
FAILURES_ALLOWED=3
TRIES=4

# What a host runs before the training. It may run again, and changes nothing then.
setup() {
  cat @SETUP@
}

# Begins the training, unless it is under way; shows its output until it ends. It goes on when the
# connection breaks, and whoever runs this again sees it from the beginning.
train() {
  cat << 'END_OF_TRAIN'
set -euo pipefail
cd "$HOME/launch"
if [[ ! -f code ]] && ! { [[ -f pid ]] && kill -0 "$(cat pid)" 2> /dev/null; }; then
  rm -f pid
  nohup setsid bash run.sh > log 2>&1 < /dev/null &
  until [[ -f pid ]]; do sleep 1; done
fi
tail --lines=+1 --follow --pid="$(cat pid)" log
until [[ -f code ]]; do sleep 1; done
exit "$(cat code)"
END_OF_TRAIN
}

# Has the training save and end, and not begin again.
end() {
  cat << 'END_OF_END'
cd "$HOME/launch" || exit 0
echo stopped > stopped
if [[ -f pid && ! -f code ]]; then
  kill -TERM "$(cat pid)" 2> /dev/null || true
  for _ in {1..300}; do [[ -f code ]] && break; sleep 1; done
fi
END_OF_END
}

on_every_host() {
  local node process processes=() code=0
  for node in "${NODES[@]}"; do
    gcloud compute tpus tpu-vm ssh "$node" --zone="$ZONE" --worker=all --quiet --command="$1" &
    processes+=("$!")
  done
  for process in "${processes[@]}"; do
    wait "$process" || code=$?
  done
  return "$code"
}

on_the_first_host() {
  gcloud compute tpus tpu-vm ssh "${NODES[0]}" --zone="$ZONE" --worker=0 --quiet --command="$1"
}

# Nothing where there is no such request.
state() {
  gcloud compute tpus queued-resources list --zone="$ZONE" --filter="name~/$NAME\$" \
    --format='value(state.state)' || echo UNKNOWN
}

create() {
  [[ -n "$(state)" ]] ||
    gcloud compute tpus queued-resources create "$NAME" --zone="$ZONE" \
      --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION" \
      "${REQUEST[@]}" --quiet
}

delete() {
  [[ -z "$(state)" ]] ||
    gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
}

# The cloud may not answer at once, and what is not deleted costs.
surely() {
  local try
  for ((try = 1; try <= TRIES; try++)); do
    "$@" && return 0
    sleep "$POLL_SECONDS"
  done
  return 1
}

say() {
  echo "$(date +%H:%M) $*" >&2 || true # the terminal may be gone
}

wait_for_machines() {
  local now before=none absent=0
  while true; do
    now=$(state)
    [[ "$now" == "$before" ]] || say "$NAME is ${now:-absent}"
    before=$now
    case "$now" in
      ACTIVE) return 0 ;;
      FAILED) say "it is refused:"; describe >&2; exit 1 ;;
      SUSPENDED) return 1 ;;
      "")
        # Who takes machines away leaves the request; who deleted it does not want it again.
        absent=$((absent + 1))
        if ((absent > 1)); then say "it was deleted, and is not requested again"; exit 1; fi
        ;;
    esac
    sleep "$POLL_SECONDS"
  done
}

describe() {
  gcloud compute tpus queued-resources describe "$NAME" --zone="$ZONE"
}

run() {
  local code failures=0 again='rm -f "$HOME/launch/code" "$HOME/launch/stopped"; '
  local before=$again # where a training ended on machines that were kept
  trap finish EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  create
  while true; do
    if ! wait_for_machines; then
      say "$NAME was taken away: it is requested again"
      surely delete
      surely create
      continue
    fi
    if on_every_host "$(setup)"; then
      on_every_host "$before$(train)" || true
      before=""
      code=$(on_the_first_host 'cd "$HOME/launch" && cat stopped code' 2> /dev/null || true)
    else
      code=setup
    fi
    [[ "$code" != 0 ]] || return 0
    if [[ "$code" == stopped* ]]; then
      say "the training was stopped, and goes on when this is run again"
      return 0
    elif [[ "$(state)" != ACTIVE ]]; then
      continue
    elif [[ -z "$code" ]]; then
      say "the connection broke; the training goes on, and is looked for again"
      sleep "$POLL_SECONDS"
      continue
    fi
    failures=$((failures + 1))
    # 2 is how windlass ends where there is something to put right.
    if [[ "$code" == 2 ]] || ((failures > FAILURES_ALLOWED)); then
      say "the training ended with $code"
      exit 1
    fi
    say "ended with $code: it begins again where it was saved"
    before=$again
    sleep "$POLL_SECONDS" # a machine that has just begun may not answer yet
  done
}

# However this ends, nothing is left that costs, unless that was requested.
finish() {
  local code=$?
  set +e
  trap '' HUP INT TERM
  trap - EXIT
  if [[ "$KEEP" == yes ]]; then
    say "$NAME is kept, and costs until: bash $0 delete"
    exit "$code"
  fi
  if ((code > 128)) && [[ "$(state)" == ACTIVE ]]; then
    say "the training is saved and ended"
    on_every_host "$(end)"
  fi
  surely delete || say "$NAME COULD NOT BE DELETED, and costs until: bash $0 delete"
  exit "$code"
}

stop() {
  if [[ "$(state)" == ACTIVE ]] && ! on_every_host "$(end)"; then
    say "the training could not be reached, and may go on; bash $0 delete ends it unsaved"
    exit 1
  elif [[ "$KEEP" == yes ]]; then
    say "$NAME is kept, and costs until: bash $0 delete"
  else
    surely delete
  fi
}

status() {
  local now
  now=$(state)
  echo "$NAME is ${now:-absent}"
  if [[ "$now" == ACTIVE ]]; then
    on_the_first_host 'tail --lines=20 "$HOME/launch/log"'
  fi
}

case "${1:-run}" in
  run) run ;;
  status) status ;;
  stop) stop ;;
  delete) surely delete ;;
  *) echo "$1 is none of run, status, stop and delete" >&2; exit 2 ;;
esac
