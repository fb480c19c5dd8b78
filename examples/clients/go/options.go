package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "penstock.io/protos/common/v1"
)

const usage = `usage: client generate [options] PROMPT       continue a prompt
       client chat     [options] MESSAGE      answer a message
       client session  [options] PROMPT...    continue all prompts over one stream
       client load     [options] PROMPT       make many calls at once

options:
  --address HOST:PORT  the server (localhost:50051); dns:///NAME:PORT uses all addresses in turn
  --tls                encrypt the connection
  --ca FILE            file with the certificates to trust; implies --tls
  --timeout SECONDS    deadline of each call
  --model NAME         default: the served model
  --max-tokens N       maximum number of output tokens
  --temperature T      sampling temperature; 0: greedy
  --seed N             seed for sampling, which makes the output reproducible
  --stop TEXT          text that ends the output; the option can be repeated
chat:
  --system TEXT        system message of the conversation
session:
  --abort-after N      abort the first request after N of its messages
load:
  --at-once N          number of calls that run at the same time (1)
  --calls N            total number of calls (default: the value of --at-once)
  --for SECONDS        start new calls for this time, instead of --calls

The environment variable PENSTOCK_API_KEY has the API key that the client sends.
`

// commands has the functions of the commands, by their names on the command line.
var commands = map[string]func(context.Context, client) error{
	"generate": generate,
	"chat":     chat,
	"session":  session,
	"load":     load,
}

// options has the values of the command line. If a field of params is nil, the model's default applies.
type options struct {
	command    string
	address    string
	tls        bool
	ca         string
	timeout    time.Duration
	model      string
	params     *commonv1.SamplingParams
	system     string
	abortAfter int64
	atOnce     int64
	calls      int64
	duration   time.Duration
	texts      []string
}

// parseOptions reads the command line. If the command line is wrong, the function prints the reason and ends the program.
func parseOptions(arguments []string) options {
	opts := options{params: &commonv1.SamplingParams{}, atOnce: 1}
	if len(arguments) == 0 {
		refuse("a command is missing")
	}
	opts.command = arguments[0]
	if opts.command == "-h" || opts.command == "--help" {
		fmt.Print(usage)
		os.Exit(0)
	}
	if commands[opts.command] == nil {
		refuse("unknown command %q", opts.command)
	}
	flags := opts.flags()
	flags.Parse(arguments[1:]) // prints the reason and ends the program if a flag is wrong
	opts.texts = flags.Args()
	if len(opts.texts) == 0 || len(opts.texts) > 1 && opts.command != "session" {
		refuse("%s takes one text, not %d", opts.command, len(opts.texts))
	}
	if opts.calls > 0 && opts.duration > 0 {
		refuse("--calls and --for exclude each other")
	}
	if opts.calls == 0 {
		opts.calls = opts.atOnce
	}
	return opts
}

// flags returns the flags of the command.
func (o *options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet(o.command, flag.ExitOnError)
	flags.Usage = func() { fmt.Fprint(flags.Output(), usage) }
	flags.StringVar(&o.address, "address", "localhost:50051", "")
	flags.BoolVar(&o.tls, "tls", false, "")
	flags.StringVar(&o.ca, "ca", "", "")
	flags.Func("timeout", "", seconds(&o.timeout))
	flags.StringVar(&o.model, "model", "", "")
	flags.Func("max-tokens", "", func(text string) error {
		var value int64
		err := whole(&value, 0, math.MaxUint32)(text)
		o.params.MaxTokens = proto.Uint32(uint32(value))
		return err
	})
	flags.Func("temperature", "", func(text string) error {
		value, err := strconv.ParseFloat(text, 32)
		if err != nil {
			return fmt.Errorf("must be a number")
		}
		o.params.Temperature = proto.Float32(float32(value))
		return nil
	})
	flags.Func("seed", "", func(text string) error {
		o.params.Seed = new(int64)
		return whole(o.params.Seed, math.MinInt64, math.MaxInt64)(text)
	})
	flags.Func("stop", "", func(text string) error {
		o.params.Stop = append(o.params.Stop, text)
		return nil
	})
	switch o.command {
	case "chat":
		flags.StringVar(&o.system, "system", "", "")
	case "session":
		flags.Func("abort-after", "", whole(&o.abortAfter, 1, math.MaxInt32))
	case "load":
		flags.Func("at-once", "", whole(&o.atOnce, 1, math.MaxInt32))
		flags.Func("calls", "", whole(&o.calls, 1, math.MaxInt32))
		flags.Func("for", "", seconds(&o.duration))
	}
	return flags
}

// whole returns a function that parses a whole number into value.
func whole(value *int64, least, most int64) func(string) error {
	return func(text string) error {
		number, err := strconv.ParseInt(text, 10, 64)
		if err != nil || number < least || number > most {
			return fmt.Errorf("must be a whole number from %d to %d", least, most)
		}
		*value = number
		return nil
	}
}

// seconds returns a function that parses a number of seconds above 0 into value.
func seconds(value *time.Duration) func(string) error {
	const longest = float64(math.MaxInt64 / int64(time.Second))
	return func(text string) error {
		number, err := strconv.ParseFloat(text, 64)
		if err != nil || !(number > 0 && number <= longest) {
			return fmt.Errorf("must be a number of seconds above 0 and at most %.0f", longest)
		}
		*value = time.Duration(number * float64(time.Second))
		return nil
	}
}

// refuse prints why the command line is wrong, and ends the program.
func refuse(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n"+usage, values...)
	os.Exit(exitUsage)
}
