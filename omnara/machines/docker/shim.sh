# Processes in a container, for any POSIX shell. Sent over the standard input of one exec, so it is in no image and no argv.
# Expects V (durable, one directory for each process), T (tmpfs, only ours), WRITE (seconds that a write may take), and then
# requests on standard input:
#   verb id arguments… length <newline> body      answered on standard output by lines, the last of which is `.`
# What happens meanwhile is told on standard error: `out id`, `exit id`, `act id action`.
# Nothing that matters depends on this shell: commands have a supervisor of their own, and another exec finds all in V.
# Only regular builtins are redirected: a special one (`:`, `exec`) whose redirection fails would end the shell.
LC_ALL=C; export LC_ALL
umask 077
# Of output the newest 100 MiB stay, and the rest goes whenever there are 125. Source: machines.md §7. Chunks of 4 MiB: what is
# kept is exact to that, and a full output is about 31 files, so that whoever looks for the newest passes few names.
KEEP=104857600 TRIM=131072000 CHUNK=4194304
D4='[0-9][0-9][0-9][0-9]' D16=$D4$D4$D4$D4 # what chunks are called: other names would be no numbers

start_of() { # S = when process $1 started, in ticks since the boot; empty when there is none
  S=
  if read -r l </proc/"$1"/stat; then l=${l##*) }; set -- $l; S=${20}; fi
}
uptime_us() { read -r u _ </proc/uptime; u=${u%.*}${u#*.}; U=$((${u#"${u%%[!0]*}"} * 10000)); }
number() { N=${1#"${1%%[!0]*}"}; N=${N:-0}; }
tell() { for e in "$T"/ev.*; do [ -p "$e" ] && printf '%s\n' "$1" 1<>"$e"; done; }
alive() { # is the group of process $1 there: by its leader's number and start, never by the number alone
  G=
  if read -r b g s <"$T/p/$1/pg" && [ "$b" = "$BOOT" ]; then start_of "$g"; [ "$S" = "$s" ] && G=$g; fi
  [ -n "$G" ]
}
supervised() { read -r b p s <"$V/$1/sup" && [ "$b" = "$BOOT" ] && start_of "$p" && [ -n "$S" ] && [ "$S" = "$s" ]; }
end_group() { # TERM to group $1, and KILL after two seconds (40 x 0.05 s). Source: machines.md §7
  kill -TERM "-$1" || return 0
  finish_group "$1"
}
finish_group() {
  doomed=$1 n=0
  while kill -0 "-$1" && [ $n -lt 40 ]; do sleep 0.05; n=$((n + 1)); done
  kill_doomed
}
# A shell that cannot fork, because there are as many processes as there may be, ends then and there, in the middle of a
# function. What has to be done all the same, and takes no fork, is a trap.
kill_doomed() { [ -z "$doomed" ] || kill -KILL "-$doomed"; doomed=; }
# In a subshell, and the last thing there: $2 is done in $1 seconds, at once where there is no process to wait with, and not
# after a TERM. That may come at any moment, also when there is no process yet, or one that has not begun: so its trap is there
# first (some shells do $2 after a TERM that is not trapped) and asks what the last process is, and kills by KILL, which a child
# that still has our traps does not catch. One that was waited for has no number any more.
after() {
  before=$!
  trap 'trap - EXIT; [ "$!" = "$before" ] || kill -KILL "$!"; exit' TERM
  trap "$2" EXIT
  sleep "$1" &
  wait "$!"
  before=$!
}
finish_soon() {
  doomed=$1
  { trap kill_doomed EXIT; finish_group "$doomed"; } </dev/null >/dev/null 8>&- 9>&- &
  doomed=
}
end_record() { # the last words about process $1: state, reason, code, signal, end. Beside the volume when that is full.
  read -r begun at _ <"$V/$1/started" || begun=- at=
  ended=-
  if [ -n "$at" ]; then uptime_us; ended=$((begun + U - at)); fi
  printf '%s %s %s %s %s %s .\n' "$2" "$3" "$4" "$5" "$begun" "$ended" >"$V/$1/exit" ||
    printf '%s %s %s %s %s %s .\n' "$2" "$3" "$4" "$5" "$begun" "$ended" >"$T/x.$1"
}
ended() { # X = how process $1 ended; false while it has not
  X=
  read -r X <"$V/$1/exit" || read -r X <"$T/x.$1" || X=
  case $X in *' .') X=${X% .} ;; *) X=; return 1 ;; esac
}

pump() { # standard input into chunk files named by their offset, the oldest of which go
  own=$1
  trap pumped_out EXIT # also when it cannot fork: the pipe breaks then, for output that is not kept must not seem to be
  base=0 have=0 count=1
  while :; do
    # The first piece is told as soon as it is there, so it is one read, of what a pipe holds at most (64 KiB). After that
    # nobody is told, and one dd takes 64 reads, a chunk at most: a process for each piece would cost more than the piece.
    name=0000000000000000$base
    file=$V/$1/out/${name#"${name%????????????????}"}
    dd bs=65536 count=$count >>"$file"
    rc=$?
    size=$(wc -c <"$file")
    [ $rc -eq 0 ] || break
    [ $((base + size)) -gt $have ] || break
    have=$((base + size))
    if [ $count -eq 1 ]; then count=64; tell "out $1"; fi
    if [ "$size" -ge $CHUNK ]; then base=$have; trim "$1"; fi
  done
  if [ "$rc" -ne 0 ]; then cat >/dev/null; fi
}
pumped_out() {
  printf '' >"$T/p/$own/done"
  printf '' >"$V/$own/out.done"
  say_on d
}
# Not by the descriptor: for a trap, a shell that ends too early has undone its redirections, also those of its parents.
say_on() { printf '%s\n' "$1" 1<>"$T/p/$own/eof"; }
trim() {
  id=$1
  set -- "$V/$1"/out/$D16
  [ -e "$1" ] || return 0
  number "${1##*/}"
  [ $((have - N)) -gt $TRIM ] || return 0
  while [ $# -gt 1 ]; do
    number "${2##*/}"
    [ $((have - N)) -ge $KEEP ] || break
    rm -f "$1"
    shift
  done
}

drained() { # whether pump $1 waits for more: its child sleeps only when it has read, and kept, all that there was
  for f in /proc/[0-9]*/stat; do
    read -r l <"$f" || continue
    l=${l##*) }
    set -- "$1" $l
    if [ "$2" = S ] && [ "$3" = "$1" ]; then return 0; fi
  done
  return 1
}
launch() { # the command itself, in a session of its own, with nothing of our environment
  # In a subshell, whose redirections are its own: else the shell's word about a signal would become output.
  case $2 in
    pty) (exec env -i PATH="$PATH" HOME="$HOME" SHELL=/bin/sh TERM=xterm setsid script -q -e -c "exec /bin/sh '$T/p/$1/go'" /dev/null \
      <"$T/p/$1/in" >"$T/p/$1/out" 2>&1 7>&-) ;;
    *) (exec env -i PATH="$PATH" HOME="$HOME" setsid /bin/sh "$T/p/$1/go" <"$T/p/$1/in" >"$T/p/$1/out" 2>&1 7>&-) ;;
  esac
}
supervise() { # one command from its start to its record
  read -r me _ </proc/self/stat
  start_of "$me"
  printf '%s %s %s\n' "$BOOT" "$me" "$S" >"$V/$1/sup"
  read -r _ _ mode limit _ <"$V/$1/spec"
  own=$1 code= doomed= launched=
  trap rescue EXIT
  mkfifo "$T/p/$1/in" "$T/p/$1/hold" "$T/p/$1/out" "$T/p/$1/eof"
  pumped "$1" "$mode" "$limit" 7<>"$T/p/$1/eof"
  trap - EXIT
  tell "exit $1"
  rm -rf "$T/p/$1"
}
rescue() { # a supervisor that ends too early: an end that it knows is written, and whoever waits looks for himself
  kill_doomed
  if ended "$own"; then :
  elif [ -n "$code" ]; then conclude "$own" "$code"
  elif [ -z "$launched" ]; then
    end_record "$own" failed start_failed:processes - -
    printf '' 1<>"$T/p/$own/in" # whoever is opening these goes on
    printf '' 1<>"$T/p/$own/out"
  fi
  printf '\n' 1<>"$T/p/$own/hold"
  tell "exit $own"
}
expire() { # end process $1 after $2 seconds; says whether it will be able to
  doomed=
  trap 'say_on no' EXIT
  sleep "$2" &
  clock=$!
  trap kill_doomed EXIT
  trap 'kill "$clock"; exit' TERM
  say_on yes
  wait "$clock"
  trap exit TERM
  printf '' >"$V/$1/timeout"
  if alive "$1"; then end_group "$G"; fi
}
pumped() {
  { exec <"$T/p/$1/out"; pump "$1"; } & # for good: an end of the shell would undo another redirection before the trap
  pump=$!
  # Standard input stays open while this one lives; a byte into `hold` ends it.
  { read -r _ <&5; } 5<>"$T/p/$1/hold" 6>"$T/p/$1/in" 7>&- &
  watch=
  if [ "$3" -gt 0 ]; then
    expire "$1" "$3" &
    watch=$!
    read -r w <&7
    [ "$w" = yes ] || exit
  fi
  launched=1
  { launch "$1" "$2"; code=$?; } 2>"$T/p/$1/message"
  [ -z "$watch" ] || kill "$watch"
  if read -r _ g _ <"$T/p/$1/pg" && kill -0 "-$g"; then end_group "$g"; fi
  printf '\n' 1<>"$T/p/$1/hold"
  # What was written before the end belongs to the result; what still holds the pipe in another session does not delay it.
  # 0.3 s is what an end costs whose pipe somebody else holds, and time enough to keep the 64 KiB that a pipe holds. A pump that
  # is at work after that has a slow disk or a busy computer, so it is waited for, 20 times as long: a writer in another session
  # that never pauses keeps it at work for ever, and 6 s leave a short command's end within the 10 s that its call waits at most.
  tries=0
  while [ ! -e "$T/p/$1/done" ] && [ $tries -lt 20 ]; do
    after 0.3 'say_on t' &
    late=$!
    read -r _ <&7
    kill "$late"
    drained "$pump" && break
    tries=$((tries + 1))
  done
  conclude "$1" "$code"
}
conclude() {
  if read -r why <"$V/$1/stop"; then end_record "$1" unknown "$why" - -
  elif read -r why <"$V/$1/fail"; then end_record "$1" failed "start_failed:$why" - -
  elif [ -e "$V/$1/timeout" ]; then end_record "$1" failed timeout - -
  elif [ -e "$V/$1/term" ]; then end_record "$1" killed terminate_requested - -
  elif [ "$2" -eq 0 ]; then end_record "$1" exited - 0 -
  elif [ "$2" -gt 128 ] && { [ -s "$T/p/$1/message" ] || { [ "$2" -eq 130 ] && [ -e "$V/$1/int" ]; }; }; then
    end_record "$1" failed signal - $(($2 - 128))
  else end_record "$1" failed nonzero_exit "$2" -
  fi
}

complete() { # closed = 1 when there will be no more output of process $1
  closed=0
  if [ -e "$V/$1/out.done" ]; then closed=1
  elif read -r b _ <"$V/$1/sup"; then [ "$b" = "$BOOT" ] || closed=1
  elif ended "$1"; then closed=1
  fi
}
extent() { # A = offset of the oldest byte kept, Z = after the newest
  A=0 Z=0
  id=$1
  set -- "$V/$1"/out/$D16
  [ -e "$1" ] || return 0
  number "${1##*/}"; A=$N
  while [ $# -gt 1 ]; do shift; done
  number "${1##*/}"
  size=$(wc -c <"$1")
  Z=$((N + size))
}
record() { # everything about process $1
  [ -d "$V/$1" ] || return 0
  read -r sup made mode _ <"$V/$1/spec" || return 0
  committed=0 live=0 begun=-
  extent "$1"
  [ -d "$V/$1/bit" ] && committed=1
  complete "$1"
  read -r begun _ <"$V/$1/started" || begun=-
  if [ $committed -eq 1 ]; then
    # Between the bit and the supervisor's own note there is a moment, a few forks. It is waited for, 0.2 s (10 x 0.02 s): so
    # much costs each look at one that was lost before its note, and where it was too short the next look finds the note.
    n=0
    while [ ! -s "$V/$1/sup" ] && ! ended "$1" && [ $n -lt 10 ]; do sleep 0.02; n=$((n + 1)); done
    supervised "$1" && live=1
  else
    [ -e "$T/p/$1/go" ] && live=1
  fi
  acks=
  [ -e "$V/$1/ack.started" ] && acks=s
  [ -e "$V/$1/ack.exit" ] && acks=${acks}x
  printf 'p %s %s %s %s %s %s %s %s %s %s\n' "$1" "$sup" "$made" $live $committed $closed "$begun" "$A" "$Z" "${acks:--}"
  ended "$1" && printf 'x %s\n' "$X"
  for f in "$V/$1"/act/*; do
    case ${f##*/} in *[!A-Za-z0-9_-]*) continue ;; esac
    [ -s "$f/k" ] && action "$f"
  done
  printf 'e %s\n' "$1"
}
action() { # one action's mark, and its outcome
  read -r kind seq <"$1/k" || return 0
  read -r state why _ <"$1/o" || state=- why=-
  ack=0
  [ -e "$1/ack" ] && ack=1
  printf 'a %s %s %s %s %s %s\n' "${1##*/}" "$kind" "$seq" "$state" "$why" $ack
}
outcome() { printf '%s %s .\n' "$3" "$4" >"$V/$1/act/$2/o"; }
body() { if [ "$1" -gt 0 ]; then dd bs="$1" count=1 iflag=fullblock; fi; }

prepare() { # id supervisor mode limit now length
  mkdir -p "$T/p/$1"
  if [ -d "$V/$1/bit" ]; then body "$6" >/dev/null; record "$1"; return; fi
  body "$6" >"$T/p/$1/.go" || { body_failed "$1"; return; }
  if [ "$3" = pty ] && ! command -v script >/dev/null; then rm -rf "$T/p/$1"; printf '! nopty\n'; return; fi
  if ! command -v setsid >/dev/null || ! command -v mkfifo >/dev/null; then rm -rf "$T/p/$1"; printf '! notools\n'; return; fi
  mv "$T/p/$1/.go" "$T/p/$1/go"
  if [ ! -d "$V/$1" ]; then
    rm -rf "$V/.new.$1"
    if mkdir "$V/.new.$1" "$V/.new.$1/out" "$V/.new.$1/act" && printf '%s %s %s %s .\n' "$2" "$5" "$3" "$4" >"$V/.new.$1/spec" &&
      mv "$V/.new.$1" "$V/$1"; then :; else body_failed "$1"; return; fi
  fi
  record "$1"
}
body_failed() { rm -rf "$T/p/$1" "$V/.new.$1"; printf '! full\n'; }
execute() { # id now
  taken=old
  if mkdir "$V/$1/bit"; then
    taken=new
    uptime_us
    printf '%s %s .\n' "$2" "$U" >"$V/$1/started"
    if [ ! -e "$T/p/$1/go" ]; then end_record "$1" failed "start_failed:lost" - -
    else
      # Not by `&`: what a shell starts so ignores SIGINT for ever. The stage of a pipeline does not, and its parent, which
      # would wait for it, is killed by the other stage.
      ( read -r m _ </proc/self/stat; supervise "$1" </dev/null >/dev/null 2>&1 8>&- 9>&- | kill -KILL "$m" )
    fi
  fi
  printf '%s\n' $taken
}
slice() { # id cursor length
  extent "$1"
  at=$2 dropped=0
  if [ "$at" -lt "$A" ]; then at=$A dropped=1; fi
  [ "$at" -gt "$Z" ] && at=$Z
  stop=$((at + $3))
  [ $stop -gt "$Z" ] && stop=$Z
  complete "$1"
  from=$at
  set -- "$V/$1"/out/$D16
  while [ $# -gt 0 ] && [ "$from" -lt $stop ]; do
    number "${1##*/}"
    here=$N next=$stop
    if [ $# -gt 1 ]; then number "${2##*/}"; next=$N; fi
    [ $next -gt $stop ] && next=$stop
    if [ "$from" -lt $next ]; then
      tail -c +$((from - here + 1)) "$1" | head -c $((next - from))
      from=$next
    fi
    shift
  done >"$T/slice"
  size=$(wc -c <"$T/slice")
  printf 'd %s %s %s %s %s\n' "$at" "$Z" $dropped $closed $((size))
  cat "$T/slice"
}
marked() { # id action kind seq: true when the effect is ours to do
  mkdir "$V/$1/act/$2" || return 1
  printf '%s %s\n' "$3" "$4" >"$V/$1/act/$2/k"
  if ended "$1" || { [ -d "$V/$1/bit" ] && ! supervised "$1"; }; then outcome "$1" "$2" failed process_terminal; return 1; fi
}
feed() { # id action close: what is in the file into the command's standard input, for at most WRITE seconds
  cat "$T/w.$2" 1<>"$T/p/$1/in" &
  c=$!
  after "$WRITE" 'kill -KILL $c' &
  w=$!
  if wait $c; then
    if [ "$3" = 1 ]; then printf '\n' 1<>"$T/p/$1/hold"; printf '' >"$V/$1/in.closed"; fi
    outcome "$1" "$2" applied -
  else
    outcome "$1" "$2" unknown stdin_write_unknown
    read -r _ _ mode _ <"$V/$1/spec" && [ "$mode" = pty ] && alive "$1" && kill -KILL "-$G"
  fi
  kill $w
  rm -f "$T/w.$2"
  tell "act $1 $2"
}
write() { # id action seq close length
  body "$5" >"$T/w.$2" || { rm -f "$T/w.$2"; printf '! full\n'; return; }
  if marked "$1" "$2" write "$3"; then
    mode=
    [ "$4" = 1 ] && read -r _ _ mode _ <"$V/$1/spec"
    if [ "$mode" = pty ]; then outcome "$1" "$2" failed close_stdin_unsupported
    elif [ -e "$V/$1/in.closed" ] || [ ! -p "$T/p/$1/in" ]; then outcome "$1" "$2" failed stdin_closed
    else feed "$1" "$2" "$4" </dev/null >/dev/null 8>&- 9>&- & return
    fi
  fi
  rm -f "$T/w.$2"
}
settled() { # wait a moment for the group of a command that was begun just now
  # 1 s (50 x 0.02 s): its shell has to be forked and to write one line first. Other requests of this line wait meanwhile.
  n=0
  while ! alive "$1"; do
    [ -e "$V/$1/sup" ] && ! ended "$1" && [ $n -lt 50 ] || return 1
    sleep 0.02
    n=$((n + 1))
  done
}
signal() { # id action seq kind
  if [ "$4" = terminate ] && mkdir "$V/$1/bit"; then end_record "$1" killed terminate_requested - -; fi
  marked "$1" "$2" "$4" "$3" || return 0
  if ! settled "$1"; then outcome "$1" "$2" failed process_terminal; return; fi
  if [ "$4" = interrupt ]; then
    printf '' >"$V/$1/int"
    kill -INT "-$G"
  else
    printf '' >"$V/$1/term"
    kill -TERM "-$G"
  fi
  outcome "$1" "$2" applied -
  if [ "$4" = terminate ]; then finish_soon "$G"; fi
}
stop() { # id reason
  [ -d "$V/$1" ] && ! ended "$1" || return 0
  if mkdir "$V/$1/bit"; then end_record "$1" unknown "$2" - -; tell "exit $1"; return; fi
  printf '%s\n' "$2" >"$V/$1/stop"
  if settled "$1"; then kill -TERM "-$G"; finish_soon "$G"; fi
  if ! supervised "$1" && ! ended "$1"; then end_record "$1" unknown "$2" - -; fi
}
forget() {
  if [ -d "$V/$1/bit" ] && ! ended "$1" && supervised "$1"; then printf '! live\n'; return; fi
  rm -rf "$V/$1" "$T/p/$1" "$T/x.$1"
}

request() { # verb id and what the verb takes
  case $2 in */* | .*) printf '! name\n'; return ;; esac
  verb=$1
  shift
  case $verb in
    prepare | execute | slice | stop | forget | record) $verb "$@" ;;
    write | signal)
      $verb "$@"
      if [ -d "$V/$1/act/$2" ]; then action "$V/$1/act/$2"; fi
      ;;
    list)
      for d in "$V"/*; do
        case ${d##*/} in *[!A-Za-z0-9_-]*) ;; *) record "${d##*/}" ;; esac
      done
      ;;
    action) if [ -d "$V/$1/act/$2" ]; then action "$V/$1/act/$2"; fi ;;
    ack)
      case $2 in
        started | exit) printf '' >"$V/$1/ack.$2" ;;
        *) if [ -d "$V/$1/act/$2" ]; then printf '' >"$V/$1/act/$2/ack"; fi ;;
      esac || printf '! full\n'
      ;;
    *) printf '! verb\n' ;;
  esac
}
serve() {
  mkdir -p "$V" "$T/p" || { printf '! full\n.\n'; return; }
  # What is no file and no directory is not ours, and a pipe, or a link to one, would hold up whoever reads it for ever.
  find "$V" ! -type d ! -type f -exec rm -f {} +
  [ -s "$T/boot" ] || printf '%s\n' "$1" >"$T/boot"
  read -r BOOT <"$T/boot"
  # The newest is the one: an older one may belong to a replica that lost its claim.
  if read -r p s <"$T/serve"; then start_of "$p"; [ -n "$S" ] && [ "$S" = "$s" ] && kill -KILL "$p"; fi
  start_of $$
  printf '%s %s\n' $$ "$S" >"$T/serve"
  rm -f "$T"/ev.* "$T"/w.*
  mkfifo "$T/ev.$$" || { printf '! full\n.\n'; return; }
  serving 8<>"$T/ev.$$"
  rm -f "$T/ev.$$"
}
serving() {
  # Ends when the last writer does, which is this shell.
  { while read -r line; do printf '%s\n' "$line"; done; } <"$T/ev.$$" >&9 8>&- &
  doomed=
  trap kill_doomed EXIT
  printf 'b %s\n.\n' "$BOOT"
  while read -r line; do
    request $line
    printf '.\n'
  done
}
