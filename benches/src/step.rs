//! `bench step`: a whole training step, forward, backward and Adam, on one process with one and with two threads and on
//! two ranks with one thread each.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Instant;

use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend as _};
use burn::tensor::{Distribution, Tensor};
use burn_spatial::comm::Comm;
use burn_spatial::{Grid, Mesh, Spatial, SpatialDevice, buffers, place, trace};
use burn_spatial_models::loss::DiceCrossEntropy;
use burn_spatial_models::{Adam, CosmoFlow, CosmoFlowConfig, UNet3d, UNet3dConfig};
use serde::{Deserialize, Serialize};

use crate::{median, table, totals};

type Backend = Autodiff<Spatial<Flex>>;
type Device = SpatialDevice<FlexDevice>;

/// A network and the width of its volumes, as in `cosmoflow-64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    model: Model,
    size: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    CosmoFlow,
    UNet3d,
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Model::CosmoFlow => "cosmoflow",
            Model::UNet3d => "unet3d",
        })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.model, self.size)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Network, String> {
        let wrong = || format!("{text:?} is none of cosmoflow-SIZE and unet3d-SIZE");
        let (model, size) = text.rsplit_once('-').ok_or_else(wrong)?;
        let model = match model {
            "cosmoflow" => Model::CosmoFlow,
            "unet3d" => Model::UNet3d,
            _ => return Err(wrong()),
        };
        Ok(Network { model, size: size.parse().map_err(|_| wrong())? })
    }
}

/// `bench step`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Networks and widths of volumes
    #[arg(long, value_delimiter = ',', default_value = "cosmoflow-64,cosmoflow-128,unet3d-32,unet3d-64")]
    pub models: Vec<Network>,
    /// Samples in a batch
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub batches: Vec<usize>,
    /// How often each setting is run, in alternation with the others
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Steps that are timed in each run, after two that are not
    #[arg(long, default_value_t = 3)]
    pub steps: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `bench one-step`: one setting, in the process or the ranks at hand.
#[derive(clap::Args, Clone, Debug)]
pub struct OneArgs {
    /// Network and width of volumes
    #[arg(long)]
    pub model: Network,
    /// Samples in a batch
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Ranks along data, depth, height and width
    #[arg(long, default_value = "1x1x1x1")]
    pub grid: Grid,
    /// Steps that are timed, after two that are not
    #[arg(long, default_value_t = 3)]
    pub steps: usize,
    /// Also print, on standard error, of each rank how often a span was entered in a step, and the milliseconds in it
    #[arg(long)]
    pub spans: bool,
}

/// One setting. Seconds are those of one step: the median over steps and rounds; parts are rank 0's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// `cosmoflow` or `unet3d`.
    pub model: String,
    /// Voxels along each edge.
    pub size: usize,
    /// Samples in a batch, of all ranks together.
    pub batch: usize,
    /// Processes.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// Ranks along data, depth, height and width.
    pub grid: String,
    /// What [`burn_spatial::kernels::instructions`] says.
    pub instructions: String,
    /// A step.
    pub seconds: f64,
    /// The most memory a rank had.
    pub peak_mib: f64,
    /// What was resident before the network was made.
    pub start_mib: f64,
    /// Weights, gradients and moments.
    pub state_mib: f64,
    /// In kernels for windows and norms.
    pub kernel_s: f64,
    /// In halo exchanges.
    pub halo_s: f64,
    /// In reductions over ranks.
    pub reduce_s: f64,
    /// In Adam.
    pub optimizer_s: f64,
    /// Bytes of large buffers a step that the system made, and that were kept from before.
    pub made_mib: f64,
    /// See `made_mib`.
    pub reused_mib: f64,
    /// Bytes a step that rank 0's process copied to move or rearrange tensors.
    pub copied_mib: f64,
}

/// Processes, threads of each and the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting {
    ranks: usize,
    threads: usize,
    grid: Grid,
}

fn settings(batch: usize) -> Vec<Setting> {
    let setting = |ranks, threads, grid| Setting { ranks, threads, grid: Grid(grid) };
    let mut all = vec![setting(1, 1, [1; 4]), setting(1, 2, [1; 4]), setting(2, 1, [1, 2, 1, 1])];
    if batch.is_multiple_of(2) {
        all.push(setting(2, 1, [2, 1, 1, 1]));
    }
    all
}

/// Runs every setting in turn, `rounds` times, and prints and writes the medians.
///
/// # Errors
/// A message for the user.
pub fn run(args: &Args) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for network in &args.models {
        for batch in &args.batches {
            let settings = settings(*batch);
            let mut runs = vec![Vec::new(); settings.len()];
            for _ in 0..args.rounds.max(1) {
                for (setting, runs) in settings.iter().zip(&mut runs) {
                    runs.push(child(&program, *network, *batch, *setting, args.steps)?);
                }
            }
            let medians: Vec<Row> = runs.iter().map(|runs| of_runs(runs)).collect();
            show(&medians);
            rows.extend(medians);
        }
    }
    args.json.as_ref().map_or(Ok(()), |path| table::write(path, &rows))
}

/// One run of a setting in processes of its own.
fn child(program: &Path, network: Network, batch: usize, setting: Setting, steps: usize) -> Result<Row, String> {
    let mut command = if setting.ranks == 1 {
        Command::new(program)
    } else {
        let mut command = Command::new("mpirun");
        command.arg("-n").arg(setting.ranks.to_string()).arg(program);
        command
    };
    command.args(["one-step", "--model", &network.to_string(), "--batch", &batch.to_string()]);
    command.args(["--grid", &setting.grid.to_string(), "--steps", &steps.to_string()]);
    let output = command.env("RAYON_NUM_THREADS", setting.threads.to_string()).output();
    let output = output.map_err(|error| format!("{} cannot be started: {error}", command.get_program().display()))?;
    if !output.status.success() {
        return Err(format!("{network} on {setting:?} failed:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("{network} on {setting:?} printed no row: {error}"))
}

fn of_runs(runs: &[Row]) -> Row {
    let middle = |of: fn(&Row) -> f64| median(runs.iter().map(of).collect());
    Row {
        seconds: middle(|row| row.seconds),
        peak_mib: middle(|row| row.peak_mib),
        start_mib: middle(|row| row.start_mib),
        kernel_s: middle(|row| row.kernel_s),
        halo_s: middle(|row| row.halo_s),
        reduce_s: middle(|row| row.reduce_s),
        optimizer_s: middle(|row| row.optimizer_s),
        made_mib: middle(|row| row.made_mib),
        reused_mib: middle(|row| row.reused_mib),
        copied_mib: middle(|row| row.copied_mib),
        ..runs[0].clone()
    }
}

/// Prints rows of one network and batch, with their speed as a multiple of the first's.
fn show(rows: &[Row]) {
    let Some(first) = rows.first() else { return };
    println!("\n{} {}^3, batch {}, {:.0} MiB of weights, gradients and moments", first.model, first.size, first.batch, first.state_mib);
    let cells = |row: &Row| {
        let rest = row.seconds - row.kernel_s - row.halo_s - row.reduce_s - row.optimizer_s;
        let parts = [row.kernel_s, row.halo_s, row.reduce_s, row.optimizer_s, rest].map(|s| format!("{s:.3}"));
        let start = [row.ranks.to_string(), row.threads.to_string(), row.grid.clone(), format!("{:.3}", row.seconds)];
        let times = [format!("{:.2}", first.seconds / row.seconds), format!("{:.0}", row.peak_mib)];
        let buffers = [row.made_mib, row.reused_mib, row.copied_mib].map(|mib| format!("{mib:.0}"));
        [start.to_vec(), times.to_vec(), parts.to_vec(), buffers.to_vec()].concat()
    };
    let names = [
        "ranks", "threads", "grid", "s/step", "speed", "peak MiB", "kernels", "halos", "reduce", "Adam", "rest", "new MiB", "reused",
        "copied",
    ];
    table::print(&names, &rows.iter().map(cells).collect::<Vec<_>>());
}

/// Measures one setting and prints its row as JSON on rank 0. Collective.
///
/// # Errors
/// A message for the user.
pub fn one(args: &OneArgs, comm: Comm) -> Result<(), String> {
    let mesh = Mesh::new(comm, args.grid).map_err(|error| error.to_string())?;
    let device = SpatialDevice::new(FlexDevice, mesh).map_err(|error| error.to_string())?;
    let row = match args.model.model {
        Model::CosmoFlow => {
            let config = CosmoFlowConfig::new(args.model.size);
            let model = config.init::<Backend>(&device).map_err(|error| error.to_string())?;
            let y = Tensor::random([args.batch, 4], Distribution::Uniform(-1.0, 1.0), &device);
            let loss = move |model: &CosmoFlow<Backend>, x| MseLoss::new().forward(model.forward(x), y.clone(), Reduction::Mean);
            measure(args, &device, model, 4, loss)?
        }
        Model::UNet3d => {
            let model = UNet3dConfig::new().init::<Backend>(&device).map_err(|error| error.to_string())?;
            let loss = |model: &UNet3d<Backend>, x: Tensor<Backend, 5>| {
                let class = x.clone().greater_elem(0.0).int() + x.clone().greater_elem(0.5).int();
                DiceCrossEntropy::new().forward(model.forward(x), class.squeeze_dim::<4>(1))
            };
            measure(args, &device, model, 1, loss)?
        }
    };
    if device.mesh().rank() == 0 {
        println!("{}", serde_json::to_string(&row).map_err(|error| error.to_string())?);
    }
    Ok(())
}

fn measure<M: AutodiffModule<Backend>>(
    args: &OneArgs,
    device: &Device,
    mut model: M,
    channels: usize,
    loss: impl Fn(&M, Tensor<Backend, 5>) -> Tensor<Backend, 1>,
) -> Result<Row, String>
where
    Adam: burn::optim::SimpleOptimizer<<Backend as AutodiffBackend>::InnerBackend>,
{
    let start_mib = memory_mib("VmRSS:");
    let size = args.model.size;
    Backend::seed(device, 1);
    let shape = [args.batch, channels, size, size, size];
    let x: Tensor<Backend, 5> = place::split(Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), device));
    let mut optimizer = Adam::default().init::<Backend, M>();
    let mut seconds = Vec::new();
    let mut before = BTreeMap::new();
    let mut buffers_before = buffers::counts();
    let mut copied_before = 0;
    // The first makes the optimizer's state, the second the most memory that is needed.
    const UNTIMED: usize = 2;
    for step in 0..UNTIMED + args.steps {
        device.mesh().world().barrier().map_err(|error| error.to_string())?;
        if step == UNTIMED {
            totals::clear_spans();
            buffers_before = buffers::counts();
            copied_before = device.stats().copied_bytes;
            before = trace::TARGETS.map(|target| (target, totals::seconds(target))).into();
        }
        let start = Instant::now();
        let gradients = loss(&model, x.clone()).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-4, model, gradients);
        device.mesh().world().barrier().map_err(|error| error.to_string())?;
        if step >= UNTIMED {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    if args.spans {
        for (name, count, seconds) in totals::spans() {
            let each = |x: f64| x / args.steps.max(1) as f64;
            eprintln!("{} {name:20} {:8.1} {:9.2} ms", device.mesh().rank(), each(count as f64), 1e3 * each(seconds));
        }
    }
    let part = |target| (totals::seconds(target) - before.get(target).copied().unwrap_or(0.0)) / args.steps.max(1) as f64;
    let peaks = device.mesh().world().all_gather(&memory_mib("VmHWM:").to_le_bytes()).map_err(|error| error.to_string())?;
    let peaks = peaks.into_iter().filter_map(|bytes| bytes.try_into().ok().map(f64::from_le_bytes));
    let buffers_after = buffers::counts();
    let bytes = |bytes: u64| bytes as f64 / f64::from(1 << 20) / args.steps.max(1) as f64;
    Ok(Row {
        model: args.model.model.to_string(),
        size,
        batch: args.batch,
        ranks: args.grid.ranks(),
        threads: rayon::current_num_threads(),
        grid: args.grid.to_string(),
        instructions: burn_spatial::kernels::instructions().into(),
        seconds: median(seconds),
        peak_mib: peaks.fold(0.0, f64::max),
        start_mib,
        // Four float32 numbers a parameter: weight, gradient and two moments.
        state_mib: 16.0 * model.num_params() as f64 / f64::from(1 << 20),
        kernel_s: part(trace::KERNEL),
        halo_s: part(trace::HALO),
        reduce_s: part(trace::REDUCE),
        optimizer_s: part(trace::OPTIMIZER),
        made_mib: bytes(buffers_after.made - buffers_before.made),
        reused_mib: bytes(buffers_after.reused - buffers_before.reused),
        copied_mib: bytes(device.stats().copied_bytes - copied_before),
    })
}

/// A line of Linux's /proc/self/status; 0 elsewhere.
fn memory_mib(name: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()).map_or(0.0, |kib| kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_they_are_written() {
        for text in ["cosmoflow-64", "unet3d-32"] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), text);
        }
        assert!("cosmoflow".parse::<Network>().is_err());
        assert!("resnet-64".parse::<Network>().is_err());
        assert!("unet3d-big".parse::<Network>().is_err());
    }

    #[test]
    fn a_batch_that_does_not_halve_is_not_split() {
        assert_eq!(settings(1).len(), 3);
        assert_eq!(settings(2)[3].grid, Grid([2, 1, 1, 1]));
    }
}
