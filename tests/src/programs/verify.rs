//! Runs many programs and random windows in processes of their own, and makes small what fails.
//!
//! A process that hangs cannot be mended from within: it prints its program and ends, and another goes on behind it.

use std::io::{BufRead, BufReader, Read, Write};
use std::panic;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Program;
use super::check::{Failure, Ranks, check};
use super::generate::generate;
use super::shrink::shrink;
use crate::random_windows;

/// No program may take longer.
const LIMIT: Duration = Duration::from_secs(30);
/// Nor may one that is being made smaller.
const SHRINK_LIMIT: Duration = Duration::from_secs(8);
/// Programs or windows that one process runs.
const CHUNK: u64 = 500;

/// What is run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// How many programs.
    pub programs: u64,
    /// How many windows.
    pub windows: u64,
    /// Nothing new is started after that long.
    pub limit: Option<Duration>,
    /// The first program's seed.
    pub seed: u64,
    /// It ends after so many failures.
    pub failures: usize,
    /// Processes at a time.
    pub jobs: usize,
}

impl Default for Plan {
    fn default() -> Self {
        let jobs = thread::available_parallelism().map_or(1, |n| n.get().min(8));
        Plan { programs: 1000, windows: 0, limit: None, seed: 1, failures: 1, jobs }
    }
}

/// What a process that runs programs says, a line of JSON each.
#[derive(Serialize, Deserialize)]
enum Message {
    /// How many programs or windows ran without a failure since the last word.
    Ran(u64),
    /// A program that cannot be compared: the plain backend has no gradient for it, or it is too large.
    Skipped,
    /// A program that fails.
    Program(Program, Failure),
    /// A window that fails, as text.
    Window(String),
}

fn say(message: &Message) {
    println!("{}", serde_json::to_string(message).expect("messages are text"));
}

/// Part of the work: programs or windows from a seed on.
#[derive(Clone, Copy, Debug)]
enum Chunk {
    Programs(u64, u64),
    Windows(u64, u64),
}

/// The entry of the program `random_programs`.
pub fn main(arguments: &[String]) -> ExitCode {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text}: a number is wanted"));
    let result = match arguments[..] {
        ["worker", "programs", from, count] => number(from).and_then(|from| Ok(work_on_programs(from, number(count)?))),
        ["worker", "windows", from, count] => number(from).and_then(|from| Ok(work_on_windows(from, number(count)?))),
        ["worker", "one"] => Ok(work_on_one()),
        ["program", seed] => number(seed).map(|seed| one(&generate(seed))),
        _ => plan(&arguments).map(|plan| run(&plan)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!(
                "{error}\nusage: random_programs [--programs N] [--windows N] [--minutes N] [--seed N] [--failures N] [--jobs N]\n       random_programs program SEED"
            );
            ExitCode::FAILURE
        }
    }
}

fn plan(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan::default();
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let value = rest.next().ok_or_else(|| format!("{option} wants a number"))?;
        let value: u64 = value.parse().map_err(|_| format!("{option} {value}: a number is wanted"))?;
        match *option {
            "--programs" => plan.programs = value,
            "--windows" => plan.windows = value,
            "--minutes" => plan.limit = Some(Duration::from_secs(value * 60)),
            "--seed" => plan.seed = value,
            "--failures" => plan.failures = value.max(1) as usize,
            "--jobs" => plan.jobs = value.max(1) as usize,
            _ => return Err(format!("{option} is no option")),
        }
    }
    Ok(plan)
}

/// Panics are told of by those who catch them.
fn quietly() {
    panic::set_hook(Box::new(|_| {}));
}

fn work_on_programs(from: u64, count: u64) -> bool {
    quietly();
    let mut ranks = Ranks::default();
    for seed in from..from + count {
        let program = generate(seed);
        match check(&program, &mut ranks, LIMIT) {
            Ok(true) => say(&Message::Ran(1)),
            Ok(false) => say(&Message::Skipped),
            Err(failure) => {
                let hang = failure == Failure::Hang;
                say(&Message::Program(program, failure));
                if hang {
                    // Its threads run on.
                    std::process::exit(1);
                }
            }
        }
    }
    // Threads of ranks wait for more.
    std::process::exit(0);
}

fn work_on_windows(from: u64, count: u64) -> bool {
    quietly();
    match random_windows::run_many(from, count, LIMIT, &|| say(&Message::Ran(1)), &|text| say(&Message::Window(text))) {
        Ok(()) => std::process::exit(0),
        Err(text) => {
            say(&Message::Window(text));
            std::process::exit(1);
        }
    }
}

/// Checks the program on standard input.
fn work_on_one() -> bool {
    quietly();
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).expect("a program comes in");
    let program: Program = serde_json::from_str(&text).expect("a program is JSON");
    match check(&program, &mut Ranks::default(), SHRINK_LIMIT) {
        Ok(true) => say(&Message::Ran(1)),
        Ok(false) => say(&Message::Skipped),
        Err(failure) => say(&Message::Program(program, failure)),
    }
    std::process::exit(0);
}

fn worker(arguments: &[String]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.arg("worker").args(arguments).stdout(Stdio::piped());
    command
}

/// How a program fails, in a process of its own.
fn alone(program: &Program) -> Option<Failure> {
    let mut child = worker(&["one".to_owned()]).stdin(Stdio::piped()).spawn().expect("this program runs again");
    let text = serde_json::to_string(program).expect("programs are text");
    // One that ends before it has read all says nothing, which is seen below.
    let _ = child.stdin.take().expect("piped").write_all(text.as_bytes());
    let (sender, receiver) = mpsc::channel();
    let stdout = child.stdout.take().expect("piped");
    thread::spawn(move || {
        let mut line = String::new();
        let _ = BufReader::new(stdout).read_line(&mut line);
        let _ = sender.send(line);
    });
    let line = receiver.recv_timeout(SHRINK_LIMIT * 2);
    end(&mut child);
    match line {
        // It cannot even be read by the plain backend in time.
        Err(_) => Some(Failure::Hang),
        Ok(line) => match serde_json::from_str(&line) {
            Ok(Message::Program(_, failure)) => Some(failure),
            Ok(_) => None,
            Err(_) => Some(Failure::Panic("the process ended without a word".to_owned())),
        },
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// The smallest program that fails in this way, printed; how it fails.
fn report(program: &Program, failure: &Failure) {
    println!("\nFAILED {failure}\n{program}");
    let Some(first) = alone(program) else {
        println!("by itself it does not fail");
        return;
    };
    let kind = std::mem::discriminant(&first);
    let started = Instant::now();
    let small = shrink(program.clone(), |candidate| {
        // Long enough: what is left is printed.
        started.elapsed() < Duration::from_secs(300) && alone(candidate).is_some_and(|f| std::mem::discriminant(&f) == kind)
    });
    let failure = alone(&small).unwrap_or(first);
    println!("smaller: {failure}\n{small}{}", serde_json::to_string(&small).expect("programs are text"));
}

/// Runs one program; whether it passes.
fn one(program: &Program) -> bool {
    quietly();
    println!("{program}");
    match alone(program) {
        None => {
            println!("ok");
            true
        }
        Some(failure) => {
            report(program, &failure);
            false
        }
    }
}

/// Runs all that is planned; whether nothing failed.
pub fn run(plan: &Plan) -> bool {
    quietly();
    let start = Instant::now();
    let mut chunks: Vec<Chunk> = Vec::new();
    let cut = |n: u64| (0..n).step_by(CHUNK as usize).map(move |at| (plan.seed + at, CHUNK.min(n - at)));
    let (mut programs, mut windows) = (cut(plan.programs), cut(plan.windows));
    // In turn, so that a limit of time leaves both.
    loop {
        let next = (programs.next(), windows.next());
        chunks.extend(next.0.map(|(from, n)| Chunk::Programs(from, n)));
        chunks.extend(next.1.map(|(from, n)| Chunk::Windows(from, n)));
        if next == (None, None) {
            break;
        }
    }
    chunks.reverse();
    let (sender, messages) = mpsc::channel();
    let mut running = 0;
    let mut start_next = |running: &mut usize| {
        let open = plan.limit.is_none_or(|limit| start.elapsed() < limit);
        if let (true, Some(chunk)) = (open, chunks.pop()) {
            let sender = sender.clone();
            thread::spawn(move || work(chunk, &sender));
            *running += 1;
        }
    };
    (0..plan.jobs).for_each(|_| start_next(&mut running));
    let mut count = Count::default();
    let mut said = Instant::now();
    while running > 0 && count.failures < plan.failures {
        if count.take(&messages) {
            running -= 1;
            start_next(&mut running);
        }
        if said.elapsed() > Duration::from_secs(20) {
            said = Instant::now();
            println!("{count} after {:.0} s", start.elapsed().as_secs_f64());
        }
    }
    println!("{count} in {:.1} s, seeds from {}", start.elapsed().as_secs_f64(), plan.seed);
    if count.programs + count.skipped < plan.programs || count.windows < plan.windows {
        println!("of {} programs and {} windows that were asked for", plan.programs, plan.windows);
    }
    count.failures == 0
}

/// What a thread that watches a process has to tell.
enum News {
    Programs(Message),
    Windows(Message),
    Crash(String),
    Ended,
}

/// Runs a chunk in processes, another one behind each that ends early.
fn work(chunk: Chunk, sender: &Sender<News>) {
    let (mut from, to, kind) = match chunk {
        Chunk::Programs(from, n) => (from, from + n, "programs"),
        Chunk::Windows(from, n) => (from, from + n, "windows"),
    };
    while from < to {
        let mut child = worker(&[kind.to_owned(), from.to_string(), (to - from).to_string()]).spawn().expect("this program runs again");
        let mut failed = false;
        for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
            let Some(message) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) else { continue };
            from += if let Message::Ran(n) = message { n } else { 1 };
            let news = if kind == "programs" { News::Programs(message) } else { News::Windows(message) };
            failed = matches!(news, News::Programs(Message::Program(..)) | News::Windows(Message::Window(_)));
            if sender.send(news).is_err() {
                end(&mut child);
                return;
            }
        }
        let well = child.wait().is_ok_and(|status| status.success());
        if !well && !failed {
            let _ = sender.send(News::Crash(format!("{kind} from seed {from}: their process ended without a word")));
            from += 1;
        }
        if !well && kind == "windows" {
            // The windows of a chunk are drawn one after the other from its first seed.
            break;
        }
    }
    let _ = sender.send(News::Ended);
}

/// What has been run so far.
#[derive(Default)]
struct Count {
    programs: u64,
    skipped: u64,
    windows: u64,
    failures: usize,
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} programs ({} skipped) and {} windows passed, {} failed", self.programs, self.skipped, self.windows, self.failures)
    }
}

impl Count {
    /// Takes the next piece of news; whether a process has ended its chunk.
    fn take(&mut self, news: &Receiver<News>) -> bool {
        match news.recv_timeout(Duration::from_secs(1)) {
            Ok(News::Programs(Message::Ran(n))) => self.programs += n,
            Ok(News::Windows(Message::Ran(n))) => self.windows += n,
            Ok(News::Programs(Message::Program(program, failure))) => {
                self.failures += 1;
                report(&program, &failure);
            }
            Ok(News::Windows(Message::Window(text)) | News::Crash(text)) => {
                self.failures += 1;
                println!("\nFAILED {text}");
            }
            Ok(News::Programs(_) | News::Windows(_)) => self.skipped += 1,
            Ok(News::Ended) => return true,
            Err(_) => {}
        }
        false
    }
}
